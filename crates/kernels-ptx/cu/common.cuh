// What every kernel uses: integer names, memory access, warp and block reductions, q8.
//
// Kernels take pointers as Global<T> and declare shared arrays with SHARED(T, name, count), so
// that the host build (../shim) can put checked pointers in their place. Accesses wider than an
// element go through load, store and load_constant. Nothing else is special: no headers of the
// toolkit are needed, and no fast-math option is allowed.
#pragma once

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using i16 = short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;

#ifndef KERNEL_SHIM

// No __restrict__: it would let the compiler move reads above wait_for_inputs().
template <class T>
using Global = T*;

#define SHARED(T, name, count) __shared__ __align__(16) T name[count]

// The bytes of shared memory that the launch asks for.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]

// The V at an address, in one access; the address is a multiple of V's size.
template <class V, class T>
__device__ __forceinline__ V load(const T* from) {
    return *reinterpret_cast<const V*>(from);
}

template <class V, class T>
__device__ __forceinline__ void store(T* to, V value) {
    *reinterpret_cast<V*>(to) = value;
}

// Shared memory that an array of bytes begins with.
template <class V>
__device__ __forceinline__ V* view_as(u8* bytes) {
    return reinterpret_cast<V*>(bytes);
}

// As load, of memory that no kernel of the step writes: weights. Allowed before wait_for_inputs(),
// and not moved behind it by the compiler. What is 8 bytes or more is taken to be read once.
template <class V, class T>
__device__ __forceinline__ V load_constant(const T* from) {
    if constexpr (sizeof(V) == 16) {
        u32 a, b, c, d;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                     : "l"(from));
        return {a, b, c, d};
    } else if constexpr (sizeof(V) == 8) {
        u32 a, b;
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(a), "=r"(b)
                     : "l"(from));
        const uint2 bits = {a, b};
        return reinterpret_cast<const V&>(bits);
    } else if constexpr (sizeof(V) == 4) {
        u32 bits;
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(bits) : "l"(from));
        return reinterpret_cast<const V&>(bits);
    } else {
        static_assert(sizeof(V) == 2, "no such access");
        V bits;
        asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(bits) : "l"(from));
        return bits;
    }
}

// As load, of what another block of the grid wrote, see last_to_arrive. Not from the cache of this
// multiprocessor.
template <class V, class T>
__device__ __forceinline__ V load_published(const T* from) {
    return __ldcg(reinterpret_cast<const V*>(from));
}

// As load_constant, if the condition holds; else the value stays. No branch.
__device__ __forceinline__ void load_constant_if(bool condition, const u8* from, uint4& value) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
        "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
        : "l"(from), "r"(u32(condition)));
}
__device__ __forceinline__ void load_constant_if(bool condition, const u8* from, uint2& value) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\t"
        "@p ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n\t}"
        : "+r"(value.x), "+r"(value.y)
        : "l"(from), "r"(u32(condition)));
}
__device__ __forceinline__ void load_constant_if(bool condition, const u8* from, u32& value) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t@p ld.global.nc.u32 %0, [%1];\n\t}"
        : "+r"(value)
        : "l"(from), "r"(u32(condition)));
}
__device__ __forceinline__ void load_constant_if(bool condition, const u8* from, u16& value) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t@p ld.global.nc.u16 %0, [%1];\n\t}"
        : "+h"(value)
        : "l"(from), "r"(u32(condition)));
}

// Copies 16 bytes to shared memory, while the thread goes on; only the first `n_bytes` are read, the
// others become 0. Both addresses are multiples of 16.
template <class T>
__device__ __forceinline__ void copy_async(T* to, const T* from, u32 n_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     u32(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(n_bytes)
                 : "memory");
}
// The same of memory that no kernel of the step writes. Allowed before wait_for_inputs().
template <class T>
__device__ __forceinline__ void copy_constant_async(T* to, const T* from, u32 n_bytes) {
    copy_async(to, from, n_bytes);
}

// Closes the batch of the thread's copies since the batch before.
__device__ __forceinline__ void close_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all of the thread's batches but the last `n_pending`, at most 7. A barrier shows them to
// others.
__device__ __forceinline__ void wait_for_copies(u32 n_pending) {
    switch (n_pending) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
    case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
    case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
    case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 7;" ::: "memory"); break;
    }
}

// a / b, correctly rounded, for numbers whose quotient, reciprocal and remainder are normal: the
// general division without its branches.
__device__ __forceinline__ float divide_ordinary(float a, float b) {
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(b));
    const float reciprocal = __fmaf_rn(estimate, __fmaf_rn(-b, estimate, 1.0f), estimate);
    const float quotient = __fmul_rn(a, reciprocal);
    return __fmaf_rn(reciprocal, __fmaf_rn(-b, quotient, a), quotient);
}

// sum + the products of four unsigned and four signed bytes.
__device__ __forceinline__ i32 dot_unsigned(u32 a, u32 b, i32 sum) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    return sum;
}

// Brings what will be read soon, and no kernel of the step writes, nearer.
template <class T>
__device__ __forceinline__ void prefetch_constant(const T* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Returns when the kernels before this one are complete and what they wrote is visible. Comes
// before any access to memory that another kernel of the step writes or reads.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks move in as soon as there is room, up to their own wait.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif  // KERNEL_SHIM

// Activations of 32 elements: element i is about scale * quant[i], scaled_sum = scale * sum of
// the quants.
struct __align__(8) Q8Group {
    float scale, scaled_sum;
};

// A logit with its token.
struct __align__(8) Candidate {
    float value;
    u32 index;
};

// Per-token parameters: words of tokens[3 * token + ..].
constexpr u32 POSITION = 0, RING_SLOT = 1, TOKEN_ID = 2, TOKEN_WORDS = 3;

constexpr u32 ALL_LANES = 0xffffffff;

// The start of every kernel that has nothing to fetch before its inputs are there.
__device__ __forceinline__ void begin() {
    wait_for_inputs();
    let_next_start();
}

__device__ __forceinline__ u32 lane_id() {
    return threadIdx.x % 32;
}

__device__ __forceinline__ u32 warp_id() {
    return threadIdx.x / 32;
}

__device__ __forceinline__ u32 div_ceil(u32 a, u32 b) {
    return a / b + (a % b != 0);
}

__device__ __forceinline__ float infinity() {
    return __uint_as_float(0x7f800000);
}

// Not contracted to one rounding: the same bits as the CPU twin.
__device__ __forceinline__ float mul_then_add(float a, float b, float c) {
    return __fadd_rn(__fmul_rn(a, b), c);
}

__device__ __forceinline__ float warp_sum(float value) {
    for (u32 offset = 16; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, offset);
    }
    return value;
}

__device__ __forceinline__ u64 warp_max(u64 value) {
    for (u32 offset = 16; offset > 0; offset /= 2) {
        const u64 other = __shfl_xor_sync(ALL_LANES, value, offset);
        value = other > value ? other : value;
    }
    return value;
}

// Sum over a block of whole warps, in every thread. One call per kernel: a second one would need
// a barrier before it.
__device__ __forceinline__ float block_sum(float value) {
    SHARED(float, partial, 32);
    value = warp_sum(value);
    if (lane_id() == 0) {
        partial[warp_id()] = value;
    }
    __syncthreads();
    return warp_sum(lane_id() < blockDim.x / 32 ? float(partial[lane_id()]) : 0.0f);
}

__device__ __forceinline__ float inverse_rms(float sum_of_squares, u32 n, float eps) {
    return rsqrtf(sum_of_squares * divide_ordinary(1.0f, float(n)) + eps);
}

// Whether this block is the last of `count` that come here: it sees with load_published what the
// others wrote before they came. All threads call it, once. The counter is 0 before and after.
//
// A barrier orders the block's writes before thread 0's fence, the fence before the count, and so
// the other way round in the last block: by the barriers' and the fences' synchronisation, every
// write of every block happens before every read behind the call.
__device__ __forceinline__ bool last_to_arrive(Global<u32> counter, u32 count) {
    SHARED(u32, is_last, 1);
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        __threadfence();
        is_last[0] = atomicInc(counter, count - 1) == count - 1;
        __threadfence();
    }
    __syncthreads();
    return is_last[0] != 0;
}

// Floats as integers of the same order. NaN counts as -infinity; -0 is below +0.
__device__ __forceinline__ u32 ordered_bits(float value) {
    const u32 bits = __float_as_uint(value == value ? value : -infinity());
    return bits ^ (bits >> 31 ? 0xffffffff : 0x80000000);
}

__device__ __forceinline__ float from_ordered_bits(u32 bits) {
    return __uint_as_float(bits ^ (bits >> 31 ? 0x80000000 : 0xffffffff));
}

// How a group of 32 is quantised, from the largest of the bits of its magnitudes. As integers they
// are ordered like the floats, then infinity, then NaNs. The integers are those of
// q4k_soa::quantize_q8:
//
//   scale = amax / 127, quant = round_half_even(x * (127 / amax))
//   amax < 2^-100: all zero; NaN or infinity in the group: quants 0, scale NaN
struct Q8Range {
    float scale, inverse;
    bool finite;

    __device__ __forceinline__ Q8Range(u32 amax_bits) : finite(amax_bits < 0x7f800000) {
        const float amax = __uint_as_float(amax_bits);
        const bool tiny = amax < 0x1p-100f;
        // Brought to where quotients need no care, by powers of two.
        const float power = amax >= 0x1p20f ? 0x1p-64f : 1.0f;
        const float quotient = divide_ordinary(127.0f, amax * power) * power;
        inverse = finite && !tiny ? quotient : 0.0f;
        // A quotient would round better by half of the last bit.
        scale = finite ? (tiny ? 0.0f : amax * (1.0f / 127.0f)) : __uint_as_float(0x7fc00000);
    }
    // Quant i in byte i. Beside 1.5 * 2^23 a float has no room for fractions, and its last bits are
    // the integer.
    __device__ __forceinline__ u32 quantize(float4 x) const {
        const float magic = 12582912.0f;
        const u32 a = __float_as_uint(mul_then_add(x.x, inverse, magic));
        const u32 b = __float_as_uint(mul_then_add(x.y, inverse, magic));
        const u32 c = __float_as_uint(mul_then_add(x.z, inverse, magic));
        const u32 d = __float_as_uint(mul_then_add(x.w, inverse, magic));
        const u32 ab = __byte_perm(a, b, 0x0040), cd = __byte_perm(c, d, 0x0040);
        return finite ? __byte_perm(ab, cd, 0x5410) : 0;
    }
    __device__ __forceinline__ u8 quantize(float x) const {
        return finite ? __float_as_uint(mul_then_add(x, inverse, 12582912.0f)) & 0xff : 0;
    }
};

__device__ __forceinline__ u32 largest_magnitude(float4 x) {
    const u32 magnitude = 0x7fffffff;
    return max(max(__float_as_uint(x.x) & magnitude, __float_as_uint(x.y) & magnitude),
               max(__float_as_uint(x.z) & magnitude, __float_as_uint(x.w) & magnitude));
}

__device__ __forceinline__ i32 sum_of_bytes(u32 bytes, i32 sum) {
    return __dp4a(i32(bytes), 0x01010101, sum);
}

// Four quants of a group of 32, with what the group has in common.
struct Q8Quad {
    u32 quants;  // element i in byte i
    i32 sum;     // of the 32 quants
    float scale;
};

// Quantises groups of 32, eight lanes a group and four elements a lane. All lanes of a warp call it.
__device__ __forceinline__ Q8Quad quantize_quad(float4 x) {
    u32 amax_bits = largest_magnitude(x);
    for (u32 offset = 4; offset > 0; offset /= 2) {
        amax_bits = max(amax_bits, __shfl_xor_sync(ALL_LANES, amax_bits, offset));
    }
    const Q8Range range(amax_bits);
    Q8Quad quad = {range.quantize(x), 0, range.scale};
    quad.sum = sum_of_bytes(quad.quants, 0);
    for (u32 offset = 4; offset > 0; offset /= 2) {
        quad.sum += __shfl_xor_sync(ALL_LANES, quad.sum, offset);
    }
    return quad;
}

// The group that a scale and a sum of quants make; a NaN scale is kept as it is.
__device__ __forceinline__ Q8Group q8_group(float scale, i32 sum) {
    return {scale, scale == scale ? scale * float(sum) : scale};
}

// Where the elements of one token's head begin in a layer of the paged KV cache,
// [physical block][K, V][kv head][token in block][dim], in elements.
struct CacheIndex {
    Global<const u32> block_table;
    u32 n_kv_head, block_size, head_dim;

    __device__ __forceinline__ u64 key(u32 slot, u32 head) const {
        return at(slot, 0, head);
    }
    __device__ __forceinline__ u64 at(u32 slot, u32 part, u32 head) const {
        const u64 plane = (u64(load_constant<u32>(block_table + slot / block_size)) * 2 + part) * n_kv_head + head;
        return (plane * block_size + slot % block_size) * head_dim;
    }
};

// Blocks of a layer of the cache in q8: i8 elements, then a f32 scale for each row, [K, V][n_kv_head]
// [block_size]. Both parts begin at multiples of 16 bytes.
struct Q8Block {
    u32 scales_at, bytes;

    __device__ __forceinline__ explicit Q8Block(const CacheIndex& index) {
        const u32 rows = 2 * index.n_kv_head * index.block_size;
        scales_at = (rows * index.head_dim + 15) & ~15;
        bytes = scales_at + ((rows * 4 + 15) & ~15);
    }
};

// Writes an element of a cached row, which is f32 or, for u16, f16; returns what the cache holds.
template <class Elem>
__device__ __forceinline__ float store_cached(Global<u8> row, u32 i, float value) {
    if constexpr (sizeof(Elem) == 2) {
        const u16 half = float_to_half(value);
        store(row + u64(i) * 2, half);
        return half_to_float(half);
    } else {
        store(row + u64(i) * 4, value);
        return value;
    }
}
