//! The signature table, and one kernel run as its CPU twin.
//!
//! `cargo run -p kernels-ptx --example signatures`

use kernels_ptx::{Access, Arg, Kernel, ParamError, ParamKind, Slice, TwinArgs};

fn main() -> Result<(), ParamError> {
    for &kernel in Kernel::ALL {
        println!("{} v{} ({})", kernel.name(), kernel.version(), kernel.source());
        for param in kernel.params() {
            match param.kind {
                ParamKind::Buffer { access, elem, optional } => {
                    let access = match access {
                        Access::Read => "reads",
                        Access::Write => "writes",
                        Access::Update => "updates",
                    };
                    let null = if optional { ", may be null" } else { "" };
                    println!("    {access} {}: {elem:?} [{}]{null}", param.name, param.shape);
                }
                ParamKind::Scalar(scalar) => println!("    {}: {scalar:?}", param.name),
            }
        }
    }

    // One token of four elements.
    let weight = [1.0_f32; 4];
    let x = [3.0_f32, -3.0, 3.0, -3.0];
    let mut y = [0.0_f32; 4];
    let mut args = TwinArgs::new();
    args.push(Arg::Buffer(Slice::Shared(bytemuck::cast_slice(&x))));
    args.push(Arg::Buffer(Slice::Shared(bytemuck::cast_slice(&weight))));
    args.push(Arg::Buffer(Slice::Exclusive(bytemuck::cast_slice_mut(&mut y))));
    args.push(Arg::U32(1)); // n_tokens
    args.push(Arg::U32(4)); // n
    args.push(Arg::F32(0.0)); // eps
    Kernel::RmsNorm.run_twin(args)?;
    println!("RMS norm of {x:?}: {y:?}");
    Ok(())
}
