//! A tool that turns GGUF weights into planes, checks them, and multiplies.

use q4k_soa::{
    PackedLayout, PackedMatrix, Shape, WeightType, fingerprint, matvec_f32, pack, quantize, unpack,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let shape = Shape { n_out: 8, n_in: 512 };
    let weights: Vec<f32> = (0..8 * 512).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let x = vec![0.25_f32; 512];
    for ty in WeightType::ALL {
        let layout = PackedLayout::planes(ty, shape)?;
        let mut source = vec![0; layout.source_bytes() as usize];
        quantize(ty, &weights, &mut source)?;
        let mut packed = vec![0; layout.len_bytes() as usize];
        pack(&layout, &source, &mut packed)?;

        let mut back = vec![0; source.len()];
        unpack(&layout, &packed, &mut back)?;
        assert_eq!(back, source, "{ty} comes back");

        let mut y = vec![0.0; 8];
        matvec_f32(&PackedMatrix::new(layout, &packed)?, &x, &mut y);
        let exact: f32 = weights[..512].iter().zip(&x).map(|(w, x)| w * x).sum();
        assert!((y[0] - exact).abs() < 0.25, "{ty}: {} is not {exact}", y[0]);
        println!(
            "{ty}: {:?}, row 0 gives {:.3} of {exact:.3}",
            fingerprint(&layout, &source)?,
            y[0]
        );
    }
    Ok(())
}
