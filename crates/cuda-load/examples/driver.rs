//! What a program built on `cust` finds on this machine:
//! `cargo run -p cuda-load --example driver`.

fn main() {
    match cuda_load::present() {
        Ok(()) => println!("library: loaded; it lacks {:?}", absent()),
        Err(missing) => println!("library: {missing}"),
    }
    #[cfg(all(target_arch = "x86_64", target_pointer_width = "64", target_os = "linux"))]
    match cust::init(cust::CudaFlags::empty()).and_then(|()| cust::device::Device::num_devices()) {
        Ok(devices) => println!("devices: {devices}"),
        Err(error) => println!("devices: none ({error:?}: {error})"),
    }
}

/// The symbols that this crate defines and this driver does not.
fn absent() -> Vec<&'static str> {
    let defined = cuda_load::SYMBOLS.iter().copied();
    defined
        .filter(|symbol| {
            let symbol = std::ffi::CString::new(*symbol).expect("no symbol has a zero byte");
            cuda_load::symbol(&symbol).is_err()
        })
        .collect()
}
