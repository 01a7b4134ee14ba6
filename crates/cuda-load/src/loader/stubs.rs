//! One jump per driver symbol.
//!
//! ```text
//! cuInit:      jmp *[entry]          every call: one indirect jump
//! entry:       .quad first_cuInit    a writable word, next to it the symbol's name
//! first_cuInit: r11 = entry; jmp cuda_load_first_call
//! ```
//!
//! The first call saves the registers that carry arguments, has [`resolve`] replace the entry's word
//! by the driver's address, restores the registers and jumps there; arguments on the stack are
//! never touched. Each symbol has sections of its own, so the linker drops those nobody calls.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::fallback;
use super::library::library;

/// The assembler's `entry` of one symbol.
#[repr(C)]
struct Entry {
    target: AtomicPtr<c_void>,
    name: *const c_char,
}

/// Called once per symbol by the assembler below, or a few times when threads race; each of
/// them stores the same address.
///
/// # Safety
///
/// `entry` is one of the entries that the assembler below defines.
unsafe extern "C" fn resolve(entry: *const Entry) -> *const c_void {
    // SAFETY: the entry is a static of this program in writable memory, aligned to 8, of the
    // layout of `Entry`; its name is a C string in read-only memory. Other threads touch it only
    // through this function's atomic store and the aligned 8-byte load of the stub's jump.
    let (entry, name) = unsafe { (&*entry, CStr::from_ptr((*entry).name)) };
    let target = match library() {
        Ok(library) => library.find(name).map_or(fallback::not_found(), |found| found.as_ptr()),
        Err(_) => fallback::without_driver(name),
    };
    entry.target.store(target, Ordering::Release);
    target
}

unsafe extern "C" {
    fn cuda_load_first_call();
}

/// Puts the stubs into every program that this crate is linked into: the linker takes a member of
/// an archive only for a symbol it is looking for, and might meet this crate before `cust`.
#[used]
static LINKED: unsafe extern "C" fn() = cuda_load_first_call;

macro_rules! symbols {
    ($($symbol:ident)*) => {
        /// Every driver symbol that this crate defines.
        pub const SYMBOLS: &[&str] = &[$(stringify!($symbol)),*];

        std::arch::global_asm!(
            // r11 = entry, which no calling convention uses for an argument. On entry rsp is 8 more
            // than a multiple of 16, as in any called function.
            r#"
            .pushsection .text.cuda_load_first_call,"ax",@progbits
            .globl cuda_load_first_call
            .hidden cuda_load_first_call
            .type cuda_load_first_call,@function
            .p2align 4
            cuda_load_first_call:
                .cfi_startproc
                push rbp
                .cfi_def_cfa_offset 16
                .cfi_offset rbp, -16
                mov rbp, rsp
                .cfi_def_cfa_register rbp
                sub rsp, 192
                movups [rsp], xmm0
                movups [rsp + 16], xmm1
                movups [rsp + 32], xmm2
                movups [rsp + 48], xmm3
                movups [rsp + 64], xmm4
                movups [rsp + 80], xmm5
                movups [rsp + 96], xmm6
                movups [rsp + 112], xmm7
                mov [rsp + 128], rdi
                mov [rsp + 136], rsi
                mov [rsp + 144], rdx
                mov [rsp + 152], rcx
                mov [rsp + 160], r8
                mov [rsp + 168], r9
                mov [rsp + 176], rax
                mov rdi, r11
                call {resolve}
                mov r11, rax
                movups xmm0, [rsp]
                movups xmm1, [rsp + 16]
                movups xmm2, [rsp + 32]
                movups xmm3, [rsp + 48]
                movups xmm4, [rsp + 64]
                movups xmm5, [rsp + 80]
                movups xmm6, [rsp + 96]
                movups xmm7, [rsp + 112]
                mov rdi, [rsp + 128]
                mov rsi, [rsp + 136]
                mov rdx, [rsp + 144]
                mov rcx, [rsp + 152]
                mov r8, [rsp + 160]
                mov r9, [rsp + 168]
                mov rax, [rsp + 176]
                leave
                .cfi_def_cfa rsp, 8
                jmp r11
                .cfi_endproc
            .size cuda_load_first_call, . - cuda_load_first_call
            .popsection

            .macro cuda_load_symbol name
                .pushsection .rodata.cuda_load.\name,"a",@progbits
                .Lcuda_load_name_\name: .asciz "\name"
                .popsection
                .pushsection .data.rel.cuda_load.\name,"aw",@progbits
                .p2align 3
                .Lcuda_load_entry_\name:
                    .quad .Lcuda_load_first_\name
                    .quad .Lcuda_load_name_\name
                .popsection
                .pushsection .text.\name,"ax",@progbits
                .globl \name
                .type \name,@function
                .p2align 4
                \name:
                    .cfi_startproc
                    jmp qword ptr [rip + .Lcuda_load_entry_\name]
                .Lcuda_load_first_\name:
                    lea r11, [rip + .Lcuda_load_entry_\name]
                    jmp cuda_load_first_call
                    .cfi_endproc
                .size \name, . - \name
                .popsection
            .endm
            "#,
            $(concat!("cuda_load_symbol ", stringify!($symbol)),)*
            ".purgem cuda_load_symbol",
            resolve = sym resolve,
        );
    };
}

include!("symbols.rs");
