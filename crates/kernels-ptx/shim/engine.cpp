// Runs kernels of ../cu on the host: block after block, each thread a fibre.
//
// Fibres run one at a time, in an order that a seed decides, and change only at barriers and warp
// operations. Beside every byte of memory lies a Cell that knows who wrote and read it, so that
// these are errors, reported with kernel, block, thread and source line:
//
// - an access out of bounds, misaligned, of uninitialised bytes, or a write to an input;
// - an access to what another kernel may write before wait_for_inputs();
// - a race: two threads of a block touch a byte without a barrier between (inside a warp: without
//   __syncwarp), or two blocks of the grid do, one of them writing and not both atomically;
// - copies to shared memory that are not waited for: the bytes come with the wait;
// - a barrier that some threads miss, or that they reach at different lines; a warp operation
//   whose lanes are missing, at another operation, or at another line; a deadlock;
// - more steps than a kernel needs.
#include "launch.hpp"
#include "shim.hpp"

namespace shim {

__thread Thread* self;

// ---- checks of an access ----

namespace {

const char* verb(Access access) {
    return access == Access::Write ? "writes" : access == Access::Atomic ? "updates" : "reads";
}

std::string named(const Allocation& allocation) {
    return text("%s %s", allocation.shared ? "shared" : "argument", allocation.name);
}

}  // namespace

// A read of what other blocks wrote: each wrote it, met at a barrier, fenced and arrived; and so
// did the reader, and met at a barrier behind that.
static void check_published(const Allocation& allocation, uint64_t offset, unsigned size) {
    const Launch& l = *launch;
    const BlockRecord& reader = l.blocks.back();
    for (uint64_t i = offset; i < offset + size; i++) {
        const Cell& cell = allocation.cells[i];
        if (!cell.initialised) {
            fail(text("reads byte %lu of %s, uninitialised", static_cast<unsigned long>(i),
                      named(allocation).c_str()));
        }
        const BlockRecord* writer = nullptr;
        for (const BlockRecord& block : l.blocks) {
            if (block.first_interval <= cell.write_interval) {
                writer = &block;
            }
        }
        const bool ordered = writer == nullptr || cell.write_interval < writer->published;
        if (!ordered || reader.published == 0 || reader.published >= l.interval) {
            fail(text("race: reads byte %lu of %s, which was not published",
                      static_cast<unsigned long>(i), named(allocation).c_str()));
        }
    }
}

void access(const Allocation* allocation, const unsigned char* at, unsigned size, unsigned align,
            Access access) {
    count_step();
    Fibre& fibre = launch->running();
    if (allocation == nullptr) {
        fail(text("%s through a null pointer", verb(access)));
    }
    const uint64_t offset = uint64_t(at - allocation->base);
    if (offset > allocation->bytes || size > allocation->bytes - offset) {
        fail(text("%s %u bytes at %ld of %s, which has %lu", verb(access), size,
                  static_cast<long>(offset), named(*allocation).c_str(),
                  static_cast<unsigned long>(allocation->bytes)));
    }
    if (reinterpret_cast<uintptr_t>(at) % align != 0) {
        fail(text("%s %u bytes at %lu of %s, misaligned", verb(access), size,
                  static_cast<unsigned long>(offset), named(*allocation).c_str()));
    }
    const bool writes = access == Access::Write || access == Access::Atomic;
    if (writes && !allocation->writable) {
        fail(text("%s %s, an input", verb(access), named(*allocation).c_str()));
    }
    if (!allocation->shared && access != Access::Constant && !fibre.waited) {
        fail(text("%s %s before waiting for inputs", verb(access), named(*allocation).c_str()));
    }
    if (access == Access::Published) {
        check_published(*allocation, offset, size);
        return;
    }
    const Toucher now = {fibre.linear, launch->interval, launch->block_first_interval,
                         launch->warps[fibre.linear / 32].phase};
    for (uint64_t i = offset; i < offset + size; i++) {
        if (access != Access::Write && !allocation->cells[i].initialised) {
            fail(text("%s byte %lu of %s, uninitialised", verb(access),
                      static_cast<unsigned long>(i), named(*allocation).c_str()));
        }
        const Race race = touch(allocation->cells[i], access, now);
        if (race.done != nullptr) {
            fail(text("race: %s byte %lu of %s, which ", verb(access),
                      static_cast<unsigned long>(i), named(*allocation).c_str()) +
                 (race.other_block ? text("another block %s", race.done)
                                   : text("thread %u %s", race.thread, race.done)));
        }
    }
}

unsigned char* shared_array(const void* site, const char* name, size_t bytes,
                            const Allocation** allocation) {
    for (const auto& array : launch->shared_arrays) {
        if (array->site == site) {
            *allocation = &array->allocation;
            return array->allocation.base;
        }
    }
    std::unique_ptr<unsigned char[]> memory(new unsigned char[bytes + 16]);
    memset(memory.get(), 0xff, bytes + 16);
    unsigned char* base = memory.get() + (16 - reinterpret_cast<uintptr_t>(memory.get()) % 16);
    launch->shared_arrays.emplace_back(
        new SharedArray{site, std::move(memory), Allocation(name, base, bytes, true, true)});
    *allocation = &launch->shared_arrays.back()->allocation;
    return base;
}

unsigned char* dynamic_shared(const void* site, const char* name, const Allocation** allocation) {
    return shared_array(site, name, launch->shared_bytes, allocation);
}

void fence() {
    launch->blocks.back().fenced = launch->interval;
}

void arrive() {
    BlockRecord& block = launch->blocks.back();
    block.published = block.fenced;
}

void inputs_waited_for() {
    launch->running().waited = true;
}

// ---- copies to shared memory ----

// The bytes come when they are waited for. Until then there is something else.
void begin_copy(unsigned char* to, const Allocation* to_owner, const unsigned char* from,
                const Allocation* from_owner, unsigned n_bytes, Access from_access) {
    if (n_bytes > 16 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
        fail(text("copies %u bytes from an address that is %u beyond a multiple of 16", n_bytes,
                  unsigned(reinterpret_cast<uintptr_t>(from) % 16)));
    }
    access(from_owner, from, n_bytes, 1, from_access);
    access(to_owner, to, 16, 16, Access::Write);
    memset(to, 0x7b, 16);
    for (unsigned i = 0; i < 16; i++) {
        to_owner->cells[to - to_owner->base + i].initialised = false;
    }
    Fibre& fibre = launch->running();
    for (const Copy& copy : fibre.copies) {
        if (copy.to == to) {
            fail(text("copies to byte %ld of %s, where a copy is on its way",
                      static_cast<long>(to - to_owner->base), named(*to_owner).c_str()));
        }
    }
    fibre.copies.push_back({to, to_owner, from, n_bytes, fibre.batch});
}

void close_copies() {
    launch->running().batch++;
}

void finish_copies(unsigned n_pending) {
    Fibre& fibre = launch->running();
    std::vector<Copy> later;
    for (const Copy& copy : fibre.copies) {
        if (copy.batch + n_pending >= fibre.batch) {
            later.push_back(copy);
            continue;
        }
        access(copy.to_owner, copy.to, 16, 16, Access::Write);
        memset(copy.to, 0, 16);
        memcpy(copy.to, copy.from, copy.n_bytes);
    }
    fibre.copies = later;
}

// ---- barriers and warp operations ----

void barrier(const char* file, int line) {
    count_step();
    Fibre& fibre = launch->running();
    fibre.state = State::Barrier;
    fibre.file = file;
    fibre.line = line;
    launch->n_at_barrier++;
    launch->suspend();
}

namespace {

const char* base_name(const char* file) {
    const char* slash = strrchr(file, '/');
    return slash != nullptr ? slash + 1 : file;
}

uint64_t warp_result(WarpOp op, const Fibre* fibres, uint32_t mask, uint32_t lane,
                     uint32_t operand, const uint64_t values[32]) {
    auto from = [&](uint32_t source) {
        if (source >= 32 || (mask >> source & 1) == 0) {
            self = const_cast<Fibre*>(&fibres[lane]);
            fail(text("warp operation takes a value of lane %u, which does not take part", source));
        }
        return values[source];
    };
    uint64_t result = op == WarpOp::All ? 1 : op == WarpOp::Min ? ~uint64_t(0) : 0;
    switch (op) {
    case WarpOp::Xor: return from(lane ^ operand);
    case WarpOp::Up: return from(lane >= operand ? lane - operand : lane);
    case WarpOp::Down: return from(lane + operand < 32 ? lane + operand : lane);
    case WarpOp::Index: return from(operand % 32);
    case WarpOp::Sync: return 0;
    default: break;
    }
    for (uint32_t i = 0; i < 32; i++) {
        if ((mask >> i & 1) == 0) {
            continue;
        }
        const uint64_t value = values[i];
        switch (op) {
        case WarpOp::Ballot: result |= value << i; break;
        case WarpOp::All: result &= value; break;
        case WarpOp::Any: result |= value; break;
        case WarpOp::Add: result = uint32_t(result + value); break;
        case WarpOp::Min: result = value < result ? value : result; break;
        case WarpOp::Max: result = value > result ? value : result; break;
        default: break;
        }
    }
    return result;
}

}  // namespace

uint64_t warp(WarpOp op, unsigned mask, uint64_t value, unsigned operand, const char* file,
              int line) {
    count_step();
    Launch& l = *launch;
    Fibre& fibre = l.running();
    const uint32_t lane = fibre.linear % 32, first = fibre.linear - lane;
    Warp& warp = l.warps[fibre.linear / 32];
    if ((mask >> lane & 1) == 0) {
        fail("warp operation whose mask lacks the calling lane");
    }
    for (uint32_t i = 0; i < 32; i++) {
        if ((mask >> i & 1) == 0) {
            continue;
        }
        if (first + i >= l.fibres.size()) {
            fail(text("warp operation with lane %u, which does not exist", i));
        }
        if (l.fibres[first + i].state == State::Done) {
            fail(text("warp operation with lane %u, which has ended", i));
        }
    }
    if (warp.arrived == 0) {
        warp.op = op;
        warp.mask = mask;
    } else {
        const Fibre& other = l.fibres[first + uint32_t(__builtin_ctz(warp.arrived))];
        if (warp.op != op || warp.mask != mask || other.line != line ||
            strcmp(other.file, file) != 0) {
            fail(text("diverged warp: this lane is at another operation than lane %u, which is at "
                      "%s:%d",
                      other.linear % 32, base_name(other.file), other.line));
        }
    }
    fibre.value = value;
    fibre.file = file;
    fibre.line = line;
    warp.operand_of[lane] = operand;
    warp.arrived |= 1u << lane;
    if (warp.arrived != mask) {
        fibre.state = State::Warp;
        l.suspend();
        return fibre.value;
    }
    uint64_t values[32];
    for (uint32_t i = 0; i < 32; i++) {
        values[i] = mask >> i & 1 ? l.fibres[first + i].value : 0;
    }
    for (uint32_t i = 0; i < 32; i++) {
        if ((mask >> i & 1) == 0) {
            continue;
        }
        l.fibres[first + i].value =
            warp_result(op, &l.fibres[first], mask, i, warp.operand_of[i], values);
        if (i != lane) {
            l.fibres[first + i].state = State::Ready;
            l.ready.push_back(first + i);
        }
    }
    warp.arrived = 0;
    if (op == WarpOp::Sync) {
        warp.phase++;
    }
    return fibre.value;
}

// ---- the scheduler ----

void Launch::release_barrier() {
    const Fibre* first = nullptr;
    for (Fibre& fibre : fibres) {
        if (fibre.state == State::Done) {
            continue;
        }
        if (first == nullptr) {
            first = &fibre;
        } else if (fibre.line != first->line || strcmp(fibre.file, first->file) != 0) {
            error = place(fibre) + text(": diverged barrier: waits at %s:%d while thread %u waits "
                                        "at %s:%d",
                                        base_name(fibre.file), fibre.line, first->linear,
                                        base_name(first->file), first->line);
            failed = true;
            return;
        }
    }
    if (n_done > 0) {
        error = place(*first) + text(": %u threads have ended without reaching the barrier at %s:%d",
                                     n_done, base_name(first->file), first->line);
        failed = true;
        return;
    }
    for (Fibre& fibre : fibres) {
        fibre.state = State::Ready;
        ready.push_back(fibre.linear);
    }
    n_at_barrier = 0;
    interval++;
}

void Launch::explain_deadlock() {
    failed = true;
    for (const Fibre& fibre : fibres) {
        if (fibre.state == State::Warp) {
            error = place(fibre) + text(": deadlock: waits at %s:%d for lanes of its warp that do "
                                        "not come",
                                        base_name(fibre.file), fibre.line);
            return;
        }
    }
}

void Launch::run_block(dim3 block) {
    interval++;
    block_first_interval = interval;
    blocks.push_back({interval});
    shared_arrays.clear();
    n_done = n_at_barrier = 0;
    ready.clear();
    for (Warp& warp : warps) {
        warp = Warp();
    }
    for (uint32_t i = 0; i < fibres.size(); i++) {
        Fibre& fibre = fibres[i];
        fibre.index = {i % block_dim.x, i / block_dim.x % block_dim.y,
                       i / block_dim.x / block_dim.y};
        fibre.block = block;
        fibre.block_dim = block_dim;
        fibre.grid_dim = grid;
        fibre.linear = i;
        fibre.waited = false;
        fibre.copies.clear();
        fibre.batch = 0;
        fibre.state = State::Ready;
        fibre.context.start(stacks->get(i), fibre_main);
        ready.push_back(i);
    }
    while (n_done < fibres.size()) {
        if (ready.empty()) {
            if (n_at_barrier + n_done == fibres.size()) {
                release_barrier();
            } else {
                explain_deadlock();
            }
            if (failed) {
                return;
            }
        }
        const uint32_t pick = draw(uint32_t(ready.size()));
        const uint32_t next = ready[pick];
        ready[pick] = ready.back();
        ready.pop_back();
        self = &fibres[next];
        scheduler.switch_to(fibres[next].context);
        if (failed) {
            return;
        }
    }
}

void Launch::run() {
    const uint32_t n_threads = block_dim.x * block_dim.y * block_dim.z;
    fibres.resize(n_threads);
    warps.resize((n_threads + 31) / 32);
    // Blocks in any order, too.
    const uint32_t n_blocks = grid.x * grid.y * grid.z;
    std::vector<uint32_t> order(n_blocks);
    for (uint32_t i = 0; i < n_blocks; i++) {
        order[i] = i;
        std::swap(order[i], order[draw(i + 1)]);
    }
    for (uint32_t i : order) {
        run_block({i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y});
        if (failed) {
            return;
        }
    }
}

static const Kernel*& kernels() {
    static const Kernel* first = nullptr;
    return first;
}

bool add(Kernel* kernel) {
    kernel->next = kernels();
    kernels() = kernel;
    return true;
}

}  // namespace shim

// ---- the interface to the tests ----

extern "C" {

// kind 0: the scalar `bits`; 1: the buffer; 2: a null pointer. `initialised` is one byte for each
// of the buffer's, null for all of them; afterwards it says which are. `name` is for messages.
struct ShimArg {
    uint32_t kind, bits;
    unsigned char* at;
    uint64_t bytes;
    unsigned char* initialised;
    uint32_t writable;
    const char* name;
};

// 0 when the kernel ran to its end and nothing was wrong. Otherwise `error` says what was.
__attribute__((visibility("default"))) int shim_launch(const char* name, const uint32_t grid[3],
                                                       const uint32_t block[3],
                                                       uint32_t shared_bytes, const ShimArg* args, size_t n_args,
                                                       uint64_t seed, int locate, char* error,
                                                       size_t error_bytes) {
    using namespace shim;
    const Kernel* kernel = kernels();
    while (kernel != nullptr && strcmp(kernel->name, name) != 0) {
        kernel = kernel->next;
    }
    auto refuse = [&](const std::string& message) {
        snprintf(error, error_bytes, "%s: %s", name, message.c_str());
        return 1;
    };
    if (kernel == nullptr) {
        return refuse("no such kernel");
    }
    if (kernel->n_params != n_args) {
        return refuse(text("takes %zu arguments, is given %zu", kernel->n_params, n_args));
    }
    if (block[0] * block[1] * block[2] > 1024 || grid[0] * grid[1] * grid[2] == 0) {
        return refuse("no possible geometry");
    }
    std::vector<Arg> bound(n_args);
    std::vector<std::unique_ptr<Allocation>> allocations;
    for (size_t i = 0; i < n_args; i++) {
        const ShimArg& arg = args[i];
        if ((arg.kind != 0) != (kernel->kinds[i] == 1)) {
            return refuse(text("parameter %zu is not of the argument's kind", i));
        }
        bound[i] = {arg.kind, arg.bits, nullptr, nullptr};
        if (arg.kind == 1) {
            allocations.emplace_back(
                new Allocation(arg.name, arg.at, arg.bytes, false, arg.writable != 0));
            Allocation& allocation = *allocations.back();
            for (uint64_t byte = 0; byte < arg.bytes; byte++) {
                allocation.cells[byte].initialised =
                    arg.initialised == nullptr || arg.initialised[byte] != 0;
            }
            bound[i].at = arg.at;
            bound[i].allocation = &allocation;
        }
    }

    Launch here;
    here.kernel = kernel;
    here.args = bound.data();
    here.grid = {grid[0], grid[1], grid[2]};
    here.block_dim = {block[0], block[1], block[2]};
    here.shared_bytes = shared_bytes;
    here.random = seed | 1;
    here.steps_left = uint64_t(1) << 24;
    here.locate = locate != 0;
    here.stacks = stack_pool.take();
    launch = &here;
    here.run();
    launch = nullptr;
    stack_pool.give_back(std::move(here.stacks));
    self = nullptr;
    if (here.failed) {
        return refuse(here.error);
    }
    size_t next = 0;
    for (size_t i = 0; i < n_args; i++) {
        if (args[i].kind != 1) {
            continue;
        }
        const Allocation& allocation = *allocations[next++];
        for (uint64_t byte = 0; args[i].initialised != nullptr && byte < args[i].bytes; byte++) {
            args[i].initialised[byte] = allocation.cells[byte].initialised;
        }
    }
    return 0;
}

}  // extern "C"
