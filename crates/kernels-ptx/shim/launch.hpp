// A launch in progress, and how it ends early. For engine.cpp alone, as the other .hpp but shim.hpp.
#pragma once

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>

#include <string>

#include "fibres.hpp"
#include "memory.hpp"
#include "shim.hpp"

namespace shim {

enum class State { Ready, Barrier, Warp, Done };

// 16 bytes on their way to shared memory, of which `n_bytes` come from `from`.
struct Copy {
    unsigned char* to;
    const Allocation* to_owner;
    const unsigned char* from;
    unsigned n_bytes, batch;
};

struct Fibre : Thread {
    Context context;
    State state;
    uint32_t linear;
    bool waited;  // for inputs
    const char* file;
    int line;
    uint64_t value;  // of the warp operation, then its result
    std::vector<Copy> copies;
    unsigned batch;  // that copies are put in
};

struct Warp {
    uint32_t arrived, mask, operand_of[32];
    WarpOp op;
    uint16_t phase;
};

struct SharedArray {
    const void* site;
    std::unique_ptr<unsigned char[]> memory;
    Allocation allocation;
};

// What a block did in intervals before `published` is ordered before what another block does that
// arrives later. 0: nothing is.
struct BlockRecord {
    uint32_t first_interval, fenced = 0, published = 0;
};

struct Launch {
    const Kernel* kernel;
    const Arg* args;
    dim3 grid, block_dim;
    uint32_t shared_bytes;
    uint64_t random;
    uint64_t steps_left;
    bool locate;

    Context scheduler;
    std::unique_ptr<Stacks> stacks;
    std::vector<Fibre> fibres;
    std::vector<Warp> warps;
    std::vector<uint32_t> ready;
    std::vector<std::unique_ptr<SharedArray>> shared_arrays;
    uint32_t n_done = 0, n_at_barrier = 0;
    uint32_t interval = 0, block_first_interval = 0;
    std::vector<BlockRecord> blocks;  // that have begun, in that order

    std::string error;
    bool failed = false;

    uint32_t draw(uint32_t below) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return uint32_t((random >> 32) * below >> 32);
    }
    Fibre& running() { return *static_cast<Fibre*>(self); }
    void suspend() { running().context.switch_to(scheduler); }

    void run();
    void run_block(dim3 block);
    void release_barrier();
    void explain_deadlock();
};

__thread Launch* launch;

__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...) {
    char buffer[512];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    return buffer;
}

// Source lines of the calls that led here, those of the kernel's own files.
std::string source_lines() {
    std::string command;
    struct Frame {
        const Frame* caller;
        unsigned char* return_address;
    };
    auto frame = static_cast<const Frame*>(__builtin_frame_address(0));
    for (int depth = 0; frame != nullptr && depth < 32; depth++, frame = frame->caller) {
        Dl_info info;
        if (frame->return_address == nullptr || dladdr(frame->return_address, &info) == 0) {
            break;
        }
        if (command.empty()) {
            command = text("addr2line -i -e '%s'", info.dli_fname);
        }
        const auto base = static_cast<unsigned char*>(info.dli_fbase);
        command += text(" %#lx", static_cast<unsigned long>(frame->return_address - 1 - base));
    }
    command += " 2>/dev/null";
    std::string lines;
    if (FILE* pipe = popen(command.c_str(), "r")) {
        char line[512];
        while (fgets(line, sizeof line, pipe) != nullptr) {
            std::string where(line);
            where = where.substr(0, where.find_first_of(" \n"));
            if (where.find(".cu") != std::string::npos) {
                lines += (lines.empty() ? " at " : ", from ") + where.substr(where.rfind('/') + 1);
            }
        }
        pclose(pipe);
    }
    return lines;
}

std::string place(const Fibre& fibre) {
    return text("block (%u, %u, %u), thread %u", fibre.block.x, fibre.block.y, fibre.block.z,
                fibre.linear);
}

// Ends the launch from inside a fibre, which is not resumed.
__attribute__((noinline)) void fail(const std::string& message) {
    launch->error = place(launch->running()) + ": " + message;
    if (launch->locate) {
        launch->error += source_lines();
    }
    launch->failed = true;
    launch->suspend();
}

void count_step() {
    if (launch->steps_left-- == 0) {
        fail("the kernel does not end");
    }
}

void fibre_main() {
    Launch& l = *launch;
    l.kernel->call(l.args);
    l.running().state = State::Done;
    l.n_done++;
    l.suspend();
}

}  // namespace shim
