// What a kernel sees instead of CUDA when a C++17 compiler builds it for the host.
//
// Include it before the kernel's source. It defines KERNEL_SHIM, on which ../cu/common.cuh leaves
// the definitions below in place of its own: Global<T> and SHARED arrays are checked pointers, and
// every access goes to the engine (engine.cpp), which runs each thread as a fibre and checks
// bounds, alignment, initialisation, races, barriers and warp operations.
#pragma once

#define KERNEL_SHIM 1

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x, y, z; };

namespace shim {

struct Allocation;

// A thread of the block that runs.
struct Thread {
    dim3 index, block, block_dim, grid_dim;
};
extern __thread Thread* self;

enum class Access { Read, Constant, Published, Write, Atomic };
enum class WarpOp { Xor, Up, Down, Index, Ballot, All, Any, Add, Min, Max, Sync };

// Checks an access of the running thread. Does not return from a wrong one.
void access(const Allocation* allocation, const unsigned char* at, unsigned size, unsigned align,
            Access access);
unsigned char* shared_array(const void* site, const char* name, size_t bytes,
                            const Allocation** allocation);
unsigned char* dynamic_shared(const void* site, const char* name, const Allocation** allocation);
void fence();
void arrive();
void barrier(const char* file, int line);
uint64_t warp(WarpOp op, unsigned mask, uint64_t value, unsigned operand, const char* file,
              int line);
void inputs_waited_for();
void begin_copy(unsigned char* to, const Allocation* to_owner, const unsigned char* from,
                const Allocation* from_owner, unsigned n_bytes, Access access);
void close_copies();
void finish_copies(unsigned n_pending);

template <class T>
class Ref;

template <class T>
struct Unconst { using Type = T; };
template <class T>
struct Unconst<const T> { using Type = T; };
template <class A, class B>
struct IfSame {};
template <class A>
struct IfSame<A, A> { using Type = A; };

// A pointer that knows its allocation.
template <class T>
class Ptr {
public:
    using Value = typename Unconst<T>::Type;

    Ptr() = default;
    Ptr(decltype(nullptr)) {}
    Ptr(unsigned char* at, const Allocation* allocation) : at(at), allocation(allocation) {}
    template <class U, class = typename IfSame<T, const U>::Type>
    Ptr(const Ptr<U>& other) : at(other.address()), allocation(other.owner()) {}

    explicit operator bool() const { return at != nullptr; }
    Ptr operator+(int64_t elements) const { return {at + elements * int64_t(sizeof(T)), allocation}; }
    auto operator[](int64_t index) const { return (*this + index).deref(static_cast<T*>(nullptr)); }

    unsigned char* address() const { return at; }
    const Allocation* owner() const { return allocation; }

    template <class V>
    V read(Access how) const {
        access(allocation, at, sizeof(V), alignof(V), how);
        V value;
        memcpy(&value, at, sizeof(V));
        return value;
    }
    template <class V>
    void write(const V& value, Access how) const {
        static_assert(sizeof(typename IfSame<T, Value>::Type), "pointer to const");
        access(allocation, at, sizeof(V), alignof(V), how);
        memcpy(at, &value, sizeof(V));
    }

private:
    Value deref(const T*) const { return read<Value>(Access::Read); }
    Ref<T> deref(Value*) const { return Ref<T>(*this); }

    unsigned char* at = nullptr;
    const Allocation* allocation = nullptr;
};

// An element that can be assigned to.
template <class T>
class Ref {
public:
    explicit Ref(Ptr<T> at) : at(at) {}
    operator T() const { return at.template read<T>(Access::Read); }
    const Ref& operator=(const T& value) const {
        at.write(value, Access::Write);
        return *this;
    }
    const Ref& operator=(const Ref& other) const { return *this = T(other); }
    const Ref& operator+=(const T& value) const { return *this = T(*this) + value; }

private:
    Ptr<T> at;
};

template <class T>
Ptr<T> shared(const void* site, const char* name, size_t count) {
    const Allocation* allocation;
    unsigned char* at = shared_array(site, name, count * sizeof(T), &allocation);
    return {at, allocation};
}

template <class T>
Ptr<T> dynamic(const void* site, const char* name) {
    const Allocation* allocation;
    unsigned char* at = dynamic_shared(site, name, &allocation);
    return {at, allocation};
}

template <class T>
T warp_value(WarpOp op, unsigned mask, T value, unsigned operand, const char* file, int line) {
    static_assert(sizeof(T) <= 8, "warp operations move 32 or 64 bits");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = warp(op, mask, bits, operand, file, line);
    memcpy(&value, &bits, sizeof(T));
    return value;
}

template <class To, class From>
To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

}  // namespace shim

#define threadIdx (shim::self->index)
#define blockIdx (shim::self->block)
#define blockDim (shim::self->block_dim)
#define gridDim (shim::self->grid_dim)

template <class T>
using Global = shim::Ptr<T>;

#define SHARED(T, name, count)         \
    static const char name##_site = 0; \
    const Global<T> name = shim::shared<T>(&name##_site, #name, count)

#define DYNAMIC_SHARED(name)                                                     \
    static const char name##_site = 0;                                           \
    const Global<unsigned char> name = shim::dynamic<unsigned char>(&name##_site, #name)

#define SHIM_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- what ../cu/common.cuh defines for CUDA ----

template <class V, class T>
V load(Global<T> from) {
    return from.template read<V>(shim::Access::Read);
}
template <class V, class T>
V load_constant(Global<T> from) {
    return from.template read<V>(shim::Access::Constant);
}
template <class T>
void prefetch_constant(Global<T>) {}
template <class V, class T>
V load_published(Global<T> from) {
    return from.template read<V>(shim::Access::Published);
}
template <class V>
void load_constant_if(bool condition, Global<const unsigned char> from, V& value) {
    if (condition) {
        value = load_constant<V>(from);
    }
}
inline float divide_ordinary(float a, float b) { return a / b; }
inline int dot_unsigned(unsigned a, unsigned b, int sum) {
    for (int i = 0; i < 32; i += 8) {
        sum += uint8_t(a >> i) * int8_t(b >> i);
    }
    return sum;
}
template <class V, class T>
void store(Global<T> to, V value) {
    to.write(value, shim::Access::Write);
}

template <class V>
Global<V> view_as(Global<unsigned char> bytes) {
    return {bytes.address(), bytes.owner()};
}

// `From`: a Global of T or const T.
template <class T, class From>
void copy_async(Global<T> to, From from, unsigned n_bytes) {
    shim::begin_copy(to.address(), to.owner(), from.address(), from.owner(), n_bytes,
                     shim::Access::Read);
}
template <class T, class From>
void copy_constant_async(Global<T> to, From from, unsigned n_bytes) {
    shim::begin_copy(to.address(), to.owner(), from.address(), from.owner(), n_bytes,
                     shim::Access::Constant);
}
inline void close_copies() { shim::close_copies(); }
inline void wait_for_copies(unsigned n_pending) { shim::finish_copies(n_pending); }

inline void wait_for_inputs() { shim::inputs_waited_for(); }
inline void let_next_start() {}

inline float half_to_float(unsigned short half) {
    const unsigned magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
    if (magnitude >= 0x0f800000) {
        return shim::bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x007fffff));
    }
    // The exponents differ by 112; a multiplication also makes normal numbers of subnormal ones.
    const float value = shim::bit_cast<float>(magnitude) * 0x1p112f;
    return shim::bit_cast<float>(sign | shim::bit_cast<unsigned>(value));
}

inline unsigned short float_to_half(float value) {
    const unsigned bits = shim::bit_cast<unsigned>(value), sign = bits >> 16 & 0x8000;
    const unsigned magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return 0x7fff;
    }
    if (magnitude >= 0x477ff000) {  // rounds to 2^16 or is beyond
        return sign | 0x7c00;
    }
    if (magnitude < 0x38800000) {  // below 2^-14: the half is subnormal, in units of 2^-24
        return sign | unsigned(lrintf(shim::bit_cast<float>(magnitude) * 0x1p24f));
    }
    const unsigned rebiased = magnitude - (112u << 23);
    return sign | (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13;
}

// ---- CUDA's own functions ----

inline void __syncthreads(SHIM_HERE) { shim::barrier(file, line); }
inline void __syncwarp(unsigned mask = 0xffffffff, SHIM_HERE) {
    shim::warp(shim::WarpOp::Sync, mask, 0, 0, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned lanes, SHIM_HERE) {
    return shim::warp_value(shim::WarpOp::Xor, mask, value, lanes, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, SHIM_HERE) {
    return shim::warp_value(shim::WarpOp::Up, mask, value, delta, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, SHIM_HERE) {
    return shim::warp_value(shim::WarpOp::Down, mask, value, delta, file, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane, SHIM_HERE) {
    return shim::warp_value(shim::WarpOp::Index, mask, value, lane, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SHIM_HERE) {
    return unsigned(shim::warp(shim::WarpOp::Ballot, mask, predicate != 0, 0, file, line));
}
inline int __all_sync(unsigned mask, int predicate, SHIM_HERE) {
    return int(shim::warp(shim::WarpOp::All, mask, predicate != 0, 0, file, line));
}
inline int __any_sync(unsigned mask, int predicate, SHIM_HERE) {
    return int(shim::warp(shim::WarpOp::Any, mask, predicate != 0, 0, file, line));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, SHIM_HERE) {
    return unsigned(shim::warp(shim::WarpOp::Add, mask, value, 0, file, line));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, SHIM_HERE) {
    return unsigned(shim::warp(shim::WarpOp::Min, mask, value, 0, file, line));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, SHIM_HERE) {
    return unsigned(shim::warp(shim::WarpOp::Max, mask, value, 0, file, line));
}

// Fibres take turns only at barriers and warp operations, so a read and a write are one step.
template <class T, class F>
T shim_atomic(Global<T> at, F f) {
    const T old = at.template read<T>(shim::Access::Atomic);
    at.write(T(f(old)), shim::Access::Atomic);
    return old;
}
template <class T, class V>
T atomicAdd(Global<T> at, V value) {
    return shim_atomic(at, [&](T old) { return old + T(value); });
}
template <class T, class V>
T atomicMin(Global<T> at, V value) {
    return shim_atomic(at, [&](T old) { return T(value) < old ? T(value) : old; });
}
template <class T, class V>
T atomicMax(Global<T> at, V value) {
    return shim_atomic(at, [&](T old) { return T(value) > old ? T(value) : old; });
}
template <class T, class V>
T atomicExch(Global<T> at, V value) {
    return shim_atomic(at, [&](T) { return T(value); });
}
// Counts round from 0 to `last`. What its block did before a fence that came before is published.
inline unsigned atomicInc(Global<unsigned> at, unsigned last) {
    shim::arrive();
    return shim_atomic(at, [&](unsigned old) { return old >= last ? 0 : old + 1; });
}
inline void __threadfence() { shim::fence(); }

inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) {
        sum += int8_t(a >> i) * int8_t(b >> i);
    }
    return sum;
}

// Byte i of the result is the byte of b:a that nibble i of the selector names.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        result |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    }
    return result;
}

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }

inline unsigned __float_as_uint(float value) { return shim::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return shim::bit_cast<float>(bits); }
inline int __float2int_rn(float value) { return int(lrintf(value)); }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline void sincospif(float half_turns, float* sine, float* cosine) {
    const double angle = half_turns * 3.14159265358979323846;
    *sine = float(sin(angle));
    *cosine = float(cos(angle));
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }

// ---- what ../cu/tensor.cuh defines for CUDA ----

namespace shim {

// Lends a value of each lane to the others while they all call `use`, which gets the lanes' values.
template <class T, class Use>
void lend(const T& mine, const char* file, int line, Use use) {
    static __thread const void* lent[32][32];
    const unsigned linear = self->index.x + self->block_dim.x * (self->index.y + self->block_dim.y * self->index.z);
    const void** const lanes = lent[linear / 32];
    lanes[linear % 32] = &mine;
    warp(WarpOp::Sync, 0xffffffff, 0, 0, file, line);
    use(linear % 32, [lanes](unsigned lane) { return *static_cast<const T*>(lanes[lane]); });
    warp(WarpOp::Sync, 0xffffffff, 0, 0, file, line);
}

}  // namespace shim

inline Global<unsigned short> as_halves(Global<unsigned char> bytes) {
    return {bytes.address(), bytes.owner()};
}
inline Global<const unsigned short> as_halves(Global<const unsigned char> bytes) {
    return {bytes.address(), bytes.owner()};
}

template <class F>
unsigned shim_halves(F f) {
    unsigned pair = 0;
    for (int i = 0; i < 2; i++) {
        pair |= unsigned(float_to_half(f(i))) << 16 * i;
    }
    return pair;
}
inline float shim_half(unsigned pair, int i) { return half_to_float(pair >> 16 * i & 0xffff); }
inline float exp2_of(float x) { return exp2f(x); }
inline unsigned and_or(unsigned a, unsigned b, unsigned c) { return (a & b) | c; }
inline unsigned half2_add(unsigned a, unsigned b) {
    return shim_halves([&](int i) { return shim_half(a, i) + shim_half(b, i); });
}
inline unsigned half2_multiply(unsigned a, unsigned b) {
    return shim_halves([&](int i) { return shim_half(a, i) * shim_half(b, i); });
}
inline unsigned half2_multiply_add(unsigned a, unsigned b, unsigned c) {
    return shim_halves([&](int i) { return shim_half(a, i) * shim_half(b, i) + shim_half(c, i); });
}

inline void multiply_tiles(float c[4], const unsigned a[4], const unsigned b[2], SHIM_HERE) {
    struct Tiles { unsigned a[4], b[2]; };
    const Tiles mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    shim::lend(mine, file, line, [&](unsigned lane, auto of) {
        for (unsigned i = 0; i < 4; i++) {
            const unsigned row = i / 2, column = lane % 4 * 2 + i % 2;
            double sum = c[i];
            for (unsigned k = 0; k < 16; k++) {
                const Tiles left = of(lane / 4 * 4 + k % 8 / 2), right = of(column * 4 + k % 8 / 2);
                sum += double(shim_half(left.a[k / 8 * 2 + row], k % 2)) *
                       shim_half(right.b[k / 8], k % 2);
            }
            c[i] = float(sum);
        }
    });
}

template <class F>
void shim_load_matrices(unsigned out[4], Global<unsigned short> row, const char* file, int line,
                        F element) {
    shim::access(row.owner(), row.address(), 16, 16, shim::Access::Read);
    shim::lend(row, file, line, [&](unsigned lane, auto of) {
        for (unsigned m = 0; m < 4; m++) {
            out[m] = 0;
            for (unsigned i = 0; i < 2; i++) {
                out[m] |= unsigned(element(m, lane / 4, lane % 4 * 2 + i, of)) << 16 * i;
            }
        }
    });
}
inline void load_matrices(unsigned out[4], Global<unsigned short> row, SHIM_HERE) {
    shim_load_matrices(out, row, file, line, [](unsigned m, unsigned i, unsigned j, auto of) {
        return load<unsigned short>(of(m * 8 + i) + j);
    });
}
inline void load_matrices_transposed(unsigned out[4], Global<unsigned short> row, SHIM_HERE) {
    shim_load_matrices(out, row, file, line, [](unsigned m, unsigned i, unsigned j, auto of) {
        return load<unsigned short>(of(m * 8 + j) + i);
    });
}

// ---- registration: SHIM_KERNEL(name) after the kernel's source ----

namespace shim {

// An argument as the caller gives it, see engine.cpp.
struct Arg {
    uint32_t kind, bits;
    unsigned char* at;
    const Allocation* allocation;
};

template <class T>
struct FromArg {
    static T get(const Arg& arg) { return bit_cast<T>(arg.bits); }
    static constexpr uint32_t kind = 0;
};
template <class T>
struct FromArg<Ptr<T>> {
    static Ptr<T> get(const Arg& arg) { return {arg.at, arg.allocation}; }
    static constexpr uint32_t kind = 1;
};

template <size_t... I>
struct Indices {};
template <size_t N, size_t... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <size_t... I>
struct MakeIndices<0, I...> { using Type = Indices<I...>; };

template <auto KERNEL>
struct Entry;
template <class... P, void (*KERNEL)(P...)>
struct Entry<KERNEL> {
    static constexpr uint32_t kinds[sizeof...(P) + 1] = {FromArg<P>::kind..., 0};
    static void call(const Arg* args) { call(args, typename MakeIndices<sizeof...(P)>::Type()); }
    template <size_t... I>
    static void call(const Arg* args, Indices<I...>) {
        KERNEL(FromArg<P>::get(args[I])...);
    }
};

struct Kernel {
    const char* name;
    void (*call)(const Arg*);
    const uint32_t* kinds;  // 1 for a pointer, 0 for a scalar
    size_t n_params;
    const Kernel* next;
};
bool add(Kernel* kernel);

template <class... P>
constexpr size_t count(void (*)(P...)) {
    return sizeof...(P);
}

}  // namespace shim

#define SHIM_KERNEL(name)                                                                     \
    static shim::Kernel name##_kernel = {#name, shim::Entry<&name>::call,                     \
                                         shim::Entry<&name>::kinds, shim::count(&name), nullptr}; \
    static const bool name##_added = shim::add(&name##_kernel);
