// Memory that knows who touched it: a Cell beside every byte.
#pragma once

#include <memory>

#include "shim.hpp"

namespace shim {

// Who touched a byte. An interval is the time between two barriers of one block; they are counted
// through the launch. A warp's phase counts its __syncwarp.
struct Cell {
    uint32_t write_interval, read_interval;  // 0: never
    uint16_t write_thread, write_phase, read_thread, read_phase;
    bool initialised : 1;
    bool atomic : 1;             // the write was
    bool foreign_write : 1;      // an earlier block wrote, atomically, before the one recorded
    bool foreign_read : 1;       // an earlier block read, before the one recorded
    bool many_readers : 1;       // of the recorded warp, interval and phase
    bool many_warps_read : 1;    // in the recorded interval
};

struct Allocation {
    const char* name;
    unsigned char* base;
    uint64_t bytes;
    bool shared, writable;
    std::unique_ptr<Cell[]> cells;

    Allocation(const char* name, unsigned char* base, uint64_t bytes, bool shared, bool writable)
        : name(name), base(base), bytes(bytes), shared(shared), writable(writable),
          cells(new Cell[bytes]()) {}
};

// A thread at a time.
struct Toucher {
    uint32_t thread, interval, block_first_interval;
    uint16_t phase;

    // Whether something done by `thread_then` is not ordered before what is done now.
    bool races(uint32_t thread_then, uint32_t interval_then, uint16_t phase_then) const {
        if (interval_then == 0) {
            return false;
        }
        if (interval_then < block_first_interval) {
            return true;  // another block
        }
        if (interval_then < interval || thread_then == thread) {
            return false;
        }
        return thread_then / 32 != thread / 32 || phase_then == phase;
    }
};

// What an access is not ordered with: `done` ("wrote" or "read") by a thread of the block, or by
// another block. No race: `done` is null.
struct Race {
    const char* done;
    bool other_block;
    uint32_t thread;
};

inline Race race_with(const char* done, bool foreign, uint32_t interval, uint32_t thread,
                      const Toucher& now) {
    return {done, foreign || interval < now.block_first_interval, thread};
}

// Records an access, and finds whether it races with one before.
inline Race touch(Cell& cell, Access access, const Toucher& now) {
    const bool both_atomic = access == Access::Atomic && cell.atomic;
    if (!both_atomic && (cell.foreign_write ||
                         now.races(cell.write_thread, cell.write_interval, cell.write_phase))) {
        return race_with("wrote", cell.foreign_write, cell.write_interval, cell.write_thread, now);
    }
    if (access == Access::Write || access == Access::Atomic) {
        const bool other_warp = cell.read_thread / 32 != now.thread / 32;
        const bool many = cell.many_warps_read ||
                          (cell.many_readers && (other_warp || cell.read_phase == now.phase));
        if (cell.foreign_read || (many && cell.read_interval == now.interval) ||
            now.races(cell.read_thread, cell.read_interval, cell.read_phase)) {
            return race_with("read", cell.foreign_read, cell.read_interval, cell.read_thread, now);
        }
        if (cell.write_interval != 0 && cell.write_interval < now.block_first_interval) {
            cell.foreign_write = true;
        }
        cell.atomic = access == Access::Atomic;
        cell.initialised = true;
        cell.write_interval = now.interval;
        cell.write_thread = uint16_t(now.thread);
        cell.write_phase = now.phase;
        return {};
    }
    if (cell.read_interval == now.interval) {
        const bool same_warp = cell.read_thread / 32 == now.thread / 32;
        const bool same_phase = same_warp && cell.read_phase == now.phase;
        cell.many_warps_read |= !same_warp;
        cell.many_readers = same_phase && (cell.many_readers || cell.read_thread != now.thread);
    } else {
        if (cell.read_interval != 0 && cell.read_interval < now.block_first_interval) {
            cell.foreign_read = true;
        }
        cell.many_warps_read = cell.many_readers = false;
    }
    cell.read_interval = now.interval;
    cell.read_thread = uint16_t(now.thread);
    cell.read_phase = now.phase;
    return {};
}

}  // namespace shim
