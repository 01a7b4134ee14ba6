//! Every symbol of the generated list can be linked to and called.
#![cfg(all(target_arch = "x86_64", target_pointer_width = "64", target_os = "linux"))]

mod common;

use common::{none, with_driver};

const NO_DEVICE: u32 = 100;

mod every_symbol {
    macro_rules! symbols {
        ($($symbol:ident)*) => {
            mod declared {
                unsafe extern "C" {
                    $(#[allow(non_snake_case)] pub(super) fn $symbol() -> u32;)*
                }
            }
            pub(super) const ALL: &[(&str, unsafe extern "C" fn() -> u32)] =
                &[$((stringify!($symbol), declared::$symbol)),*];
        };
    }
    include!("../src/loader/symbols.rs");
}

#[test]
fn every_symbol_is_defined_and_answers() {
    with_driver("every_symbol_is_defined_and_answers", none, || {
        let names: Vec<_> = every_symbol::ALL.iter().map(|symbol| symbol.0).collect();
        assert_eq!(names, cuda_load::SYMBOLS);
        for (name, function) in every_symbol::ALL {
            if !name.starts_with("cuGetError") {
                // SAFETY: without a driver only the cuGetError functions read arguments.
                assert_eq!(unsafe { function() }, NO_DEVICE, "{name}");
            }
        }
    });
}
