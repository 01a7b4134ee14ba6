//! `cust` in a program of this workspace: linked without toolkit or driver.
#![cfg(all(target_arch = "x86_64", target_pointer_width = "64", target_os = "linux"))]

mod common;

use common::{needed, none, with_driver};

#[test]
fn cust_reports_no_device_where_no_driver_is() {
    with_driver("cust_reports_no_device_where_no_driver_is", none, || {
        cuda_load::present().expect_err("CUDA_LOAD_LIBRARY is empty");
        let error = cust::init(cust::CudaFlags::empty()).expect_err("there is no driver");
        assert_eq!(error, cust::error::CudaError::NoDevice);
        // cust asks the driver for this text and panics without one.
        assert_eq!(error.to_string(), "\"no CUDA-capable device is detected\"");
        cust::device::Device::num_devices().expect_err("there is no driver");
    });
}

#[test]
fn a_program_with_cust_needs_no_libcuda_to_start() {
    let program = std::env::current_exe().expect("a test knows its own path");
    // Held against the linker's dropping what is never used.
    std::hint::black_box(cust::init as fn(_) -> _);
    match needed(&program) {
        None => eprintln!("a_program_with_cust_needs_no_libcuda_to_start: skipped, no readelf"),
        Some(names) => {
            assert!(!names.iter().any(|name| name.starts_with("libcuda")), "{names:?}");
        }
    }
}
