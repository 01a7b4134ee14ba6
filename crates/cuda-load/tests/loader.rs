//! What a caller of the driver's functions sees, with drivers that are small C libraries.
#![cfg(all(target_arch = "x86_64", target_pointer_width = "64", target_os = "linux"))]

mod common;

use std::ffi::{CStr, c_char};
use std::path::PathBuf;
use std::sync::Barrier;

use common::{folder, none, shared_library, with_driver};
use cuda_load::{Missing, present, symbol};

const NO_DEVICE: u32 = 100;
const NOT_FOUND: u32 = 500;

#[repr(C)]
#[derive(Clone, Copy)]
struct OnTheStack([u64; 5]);

// Not the driver's signatures: the stubs pass on whatever they are given.
unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDriverGetVersion(version: *mut i32) -> u32;
    fn cuMemAddressReserve() -> u32;
    fn cuGetErrorName(code: u32, text: *mut *const c_char) -> u32;
    fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32;
    fn cuMemAlloc_v2(a: u64, b: u64) -> u64;
    #[rustfmt::skip]
    fn cuLaunchKernelEx(
        i1: u64,
        d1: f64,
        i2: u64,
        d2: f64,
        i3: u64,
        d3: f64,
        i4: u64,
        d4: f64,
        i5: u64,
        d5: f64,
        i6: u64,
        d6: f64,
        big: OnTheStack,
        i7: u64,
        d7: f64,
        i8: u64,
        d8: f64,
        i9: u64,
        d9: f64,
        f10: f32,
        byte: u8,
        i10: u64,
    ) -> u32;
    fn cuParamSetf(a: f32, b: f32, c: f32, d: f32, e: f32, f: f32, g: f32, h: f32, i: f32) -> u32;
}

const DRIVER: &str = r#"
    #include <stdint.h>
    struct big { uint64_t v[5]; };
    uint32_t cuInit(uint32_t flags) { return 7000 + flags; }
    uint64_t cuMemAlloc_v2(uint64_t a, uint64_t b) { return a * 1000003 + b; }
    /* The number of the first argument that is wrong, 0 if none is. */
    uint32_t cuLaunchKernelEx(
        uint64_t i1, double d1, uint64_t i2, double d2, uint64_t i3, double d3,
        uint64_t i4, double d4, uint64_t i5, double d5, uint64_t i6, double d6, struct big big,
        uint64_t i7, double d7, uint64_t i8, double d8, uint64_t i9, double d9,
        float f10, uint8_t byte, uint64_t i10) {
        uint64_t i[10] = {i1, i2, i3, i4, i5, i6, i7, i8, i9, i10};
        double d[10] = {d1, d2, d3, d4, d5, d6, d7, d8, d9, f10};
        for (int n = 0; n < 10; n++) if (i[n] != 0xfedcba9876543210u + n) return 1 + n;
        for (int n = 0; n < 10; n++) if (d[n] != 0.5 + n) return 101 + n;
        for (int n = 0; n < 5; n++) if (big.v[n] != 1000 + n) return 201 + n;
        return byte == 99 ? 0 : 301;
    }
    uint32_t cuParamSetf(float a, float b, float c, float d, float e, float f, float g, float h,
                         float i) {
        float v[9] = {a, b, c, d, e, f, g, h, i};
        for (int n = 0; n < 9; n++) if (v[n] != 0.25f * (n + 1)) return 1 + n;
        return 0;
    }
"#;

fn driver(test: &str) -> PathBuf {
    let library = folder(test).join("driver.so");
    shared_library(DRIVER, &library, &[]);
    library
}

fn text_of(get: unsafe extern "C" fn(u32, *mut *const c_char) -> u32, code: u32) -> (u32, String) {
    let mut text = std::ptr::null();
    // SAFETY: `get` writes one pointer to a static C string, or null.
    let result = unsafe { get(code, &mut text) };
    if text.is_null() {
        return (result, String::new());
    }
    // SAFETY: see above.
    (result, unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

#[test]
fn arguments_in_registers_and_on_the_stack_arrive_intact() {
    let test = "arguments_in_registers_and_on_the_stack_arrive_intact";
    with_driver(test, driver, || {
        let i = |n: u64| 0xfedc_ba98_7654_3210 + n;
        let big = OnTheStack([1000, 1001, 1002, 1003, 1004]);
        // The first call goes through the resolver, the second does not.
        for call in ["first", "second"] {
            // SAFETY: the signatures are those of the C above.
            unsafe {
                let wrong = cuLaunchKernelEx(
                    i(0),
                    0.5,
                    i(1),
                    1.5,
                    i(2),
                    2.5,
                    i(3),
                    3.5,
                    i(4),
                    4.5,
                    i(5),
                    5.5,
                    big,
                    i(6),
                    6.5,
                    i(7),
                    7.5,
                    i(8),
                    8.5,
                    9.5,
                    99,
                    i(9),
                );
                assert_eq!(wrong, 0, "{call} call");
                let wrong = cuParamSetf(0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25);
                assert_eq!(wrong, 0, "{call} call");
                assert_eq!(cuMemAlloc_v2(5, 7), 5_000_022, "{call} call, 64-bit result");
            }
        }
    });
}

#[test]
fn threads_may_race_for_the_first_call() {
    let test = "threads_may_race_for_the_first_call";
    with_driver(test, driver, || {
        let together = Barrier::new(16);
        std::thread::scope(|scope| {
            for thread in 0..16_u32 {
                let together = &together;
                scope.spawn(move || {
                    together.wait();
                    // SAFETY: the signatures are those of the C above.
                    unsafe {
                        assert_eq!(cuInit(thread), 7000 + thread);
                        assert_eq!(
                            cuMemAlloc_v2(1, u64::from(thread)),
                            1_000_003 + u64::from(thread)
                        );
                    }
                });
            }
        });
    });
}

#[test]
fn a_symbol_that_the_driver_lacks_is_not_found() {
    let test = "a_symbol_that_the_driver_lacks_is_not_found";
    with_driver(test, driver, || {
        assert_eq!(present(), Ok(()));
        for _ in 0..2 {
            // SAFETY: reads no argument.
            assert_eq!(unsafe { cuMemAddressReserve() }, NOT_FOUND);
        }
        assert!(symbol(c"cuInit").is_ok());
        let missing = symbol(c"cuMemAddressReserve").expect_err("the C above has none");
        assert!(matches!(missing, Missing::Symbol { .. }), "{missing:?}");
        assert!(missing.to_string().contains("driver.so has no cuMemAddressReserve"), "{missing}");
    });
}

#[test]
fn without_a_library_every_call_says_no_device() {
    let test = "without_a_library_every_call_says_no_device";
    with_driver(
        test,
        |_| "/nowhere/libcuda.so.1",
        || {
            let missing = present().expect_err("there is no such file");
            assert!(matches!(missing, Missing::NotLoaded { .. }), "{missing:?}");
            assert!(missing.to_string().contains("/nowhere/libcuda.so.1"), "{missing}");
            assert!(missing.to_string().contains("No such file"), "{missing}");
            assert_eq!(symbol(c"cuInit"), Err(missing));
            let mut version = -1;
            for _ in 0..2 {
                // SAFETY: the driver's own signatures.
                unsafe {
                    assert_eq!(cuInit(0), NO_DEVICE);
                    assert_eq!(cuDriverGetVersion(&mut version), NO_DEVICE);
                }
            }
            assert_eq!(version, -1);
        },
    );
}

#[test]
fn without_a_library_errors_still_have_names_and_texts() {
    let test = "without_a_library_errors_still_have_names_and_texts";
    with_driver(test, none, || {
        assert_eq!(present(), Err(Missing::Disabled));
        assert_eq!(text_of(cuGetErrorName, 100), (0, "CUDA_ERROR_NO_DEVICE".into()));
        assert_eq!(
            text_of(cuGetErrorString, 100),
            (0, "no CUDA-capable device is detected".into())
        );
        assert_eq!(text_of(cuGetErrorString, 500), (0, "named symbol not found".into()));
        assert_eq!(text_of(cuGetErrorString, 12_345), (1, String::new()));
        // SAFETY: null is refused, not written to.
        assert_eq!(unsafe { cuGetErrorName(100, std::ptr::null_mut()) }, 1);
    });
}

#[test]
fn a_library_without_cu_init_is_no_driver() {
    let test = "a_library_without_cu_init_is_no_driver";
    let library = |test: &str| {
        let library = folder(test).join("other.so");
        shared_library("int cuDriverGetVersion(int *version) { return 0; }", &library, &[]);
        library
    };
    with_driver(test, library, || {
        let missing = present().expect_err("the C above has no cuInit");
        assert!(matches!(missing, Missing::NotADriver { .. }), "{missing:?}");
        // SAFETY: null would not be written to: no function of that library is called.
        assert_eq!(unsafe { cuDriverGetVersion(std::ptr::null_mut()) }, NO_DEVICE);
    });
}
