//! Where a matrix's planes lie: `cargo run --example planes -- Q4_K 4096 4096`.

use q4k_soa::{PackedLayout, Shape, WeightType};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "Q4_K".into());
    let mut number = |default| args.next().map_or(Ok(default), |text| text.parse::<u32>());
    let shape = Shape { n_out: number(4096)?, n_in: number(4096)? };

    let named = |ty: &WeightType| ty.name().eq_ignore_ascii_case(&name);
    let ty = WeightType::ALL.into_iter().find(named).ok_or(format!("no type is called {name}"))?;
    let layout = PackedLayout::planes(ty, shape)?;

    println!("{ty} [{}, {}]: {} bytes", shape.n_out, shape.n_in, layout.len_bytes());
    println!("{:<10} {:>14} {:>12} {:>14}", "plane", "offset", "row stride", "bytes");
    for plane in layout.plane_list() {
        println!(
            "{:<10} {:>14} {:>12} {:>14}",
            plane.name, plane.offset_bytes, plane.row_stride_bytes, plane.len_bytes
        );
    }
    Ok(())
}
