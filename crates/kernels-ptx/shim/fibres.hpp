// Fibres: a context each, switched by hand on x86-64 (5 ns) and by ucontext elsewhere, and stacks.
#pragma once

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <memory>
#include <mutex>
#include <vector>

#if defined(__x86_64__) && !defined(SHIM_UCONTEXT)
#define SHIM_SWITCH 1
#else
#include <ucontext.h>
#endif

namespace shim {

constexpr size_t STACK_BYTES = 64 << 10, GUARD_BYTES = 4 << 10;

#if SHIM_SWITCH

extern "C" void shim_switch(void** from, void* to);
asm(R"(
.text
.hidden shim_switch
.type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size shim_switch, . - shim_switch
)");

struct Context {
    void* stack_pointer = nullptr;

    void start(unsigned char* stack, void (*entry)()) {
        void** top = reinterpret_cast<void**>(stack + STACK_BYTES);
        // A return address that is never used keeps the alignment of a call; then what
        // shim_switch takes: entry and six registers, a frame pointer of 0 among them.
        top -= 8;
        for (int i = 0; i < 8; i++) {
            top[i] = nullptr;
        }
        top[6] = reinterpret_cast<void*>(entry);
        stack_pointer = top;
    }
    void switch_to(Context& to) { shim_switch(&stack_pointer, to.stack_pointer); }
};

#else

struct Context {
    ucontext_t context;

    void start(unsigned char* stack, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = STACK_BYTES;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }
    void switch_to(Context& to) { swapcontext(&context, &to.context); }
};

#endif

// Stacks with a guard page below, those of one launch.
class Stacks {
public:
    unsigned char* get(size_t index) {
        while (stacks.size() <= index) {
            void* mapped = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (mapped == MAP_FAILED || mprotect(mapped, GUARD_BYTES, PROT_NONE) != 0) {
                fprintf(stderr, "shim: no memory for the stack of a fibre\n");
                abort();
            }
            stacks.push_back(static_cast<unsigned char*>(mapped) + GUARD_BYTES);
        }
        return stacks[index];
    }
    ~Stacks() {
        for (unsigned char* stack : stacks) {
            munmap(stack - GUARD_BYTES, GUARD_BYTES + STACK_BYTES);
        }
    }

private:
    std::vector<unsigned char*> stacks;
};

// Stacks that no launch uses, for the next one. Not of a thread: its destructors would keep an
// unloaded library in memory.
class StackPool {
public:
    std::unique_ptr<Stacks> take() {
        const std::lock_guard<std::mutex> lock(mutex);
        if (unused.empty()) {
            return std::unique_ptr<Stacks>(new Stacks);
        }
        std::unique_ptr<Stacks> stacks = std::move(unused.back());
        unused.pop_back();
        return stacks;
    }
    void give_back(std::unique_ptr<Stacks> stacks) {
        const std::lock_guard<std::mutex> lock(mutex);
        unused.push_back(std::move(stacks));
    }

private:
    std::mutex mutex;
    std::vector<std::unique_ptr<Stacks>> unused;
};
StackPool stack_pool;

}  // namespace shim
