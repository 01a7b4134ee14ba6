//! Inputs that tests and `tools/reference_errors.py` make alike, and helpers.
#![allow(dead_code)] // every test binary uses a part

use q4k_soa::{PackedLayout, Shape, WeightType};

/// Knuth's 64-bit linear congruential generator; the upper bits are used.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0
    }

    pub(crate) fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 * 2f64.powi(-53)
    }

    pub(crate) fn byte(&mut self) -> u8 {
        (self.next() >> 56) as u8
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.byte()).collect()
    }

    pub(crate) fn gaussian(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.uniform()).cos()
    }

    /// Heavy tails: Student's t with three degrees of freedom.
    pub(crate) fn student_t3(&mut self) -> f64 {
        let numerator = self.gaussian();
        let squares: f64 = (0..3).map(|_| self.gaussian().powi(2)).sum();
        numerator / (squares / 3.0).sqrt()
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.gaussian() as f32).collect()
    }
}

/// Offsets of the high bytes of a block's halves, or of the float that it is.
pub(crate) fn exponent_bytes(ty: WeightType) -> &'static [usize] {
    match ty {
        WeightType::F32 => &[3],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => &[1, 3],
        WeightType::Q6K => &[209],
        _ => &[1],
    }
}

/// Random bytes that are finite weights: the halves' exponents stay below 1.
pub(crate) fn finite_blocks(ty: WeightType, n_blocks: usize, random: &mut Random) -> Vec<u8> {
    let mut source = random.bytes(n_blocks * ty.block_bytes() as usize);
    for block in source.chunks_exact_mut(ty.block_bytes() as usize) {
        for &offset in exponent_bytes(ty) {
            block[offset] &= 0xbf;
        }
    }
    source
}

/// A layout, a finite source for it, and the source packed.
pub(crate) fn finite_matrix(
    ty: WeightType,
    n_out: u32,
    n_in: u32,
) -> (PackedLayout, Vec<u8>, Vec<u8>) {
    let layout = PackedLayout::planes(ty, Shape { n_out, n_in }).unwrap();
    let n_blocks = n_out as usize * (n_in / ty.block_elems()) as usize;
    let seed = 1 + u64::from(n_out) * 1000 + u64::from(n_in);
    let source = finite_blocks(ty, n_blocks, &mut Random::new(seed));
    let packed = packed(&layout, &source);
    (layout, source, packed)
}

pub(crate) fn packed(layout: &PackedLayout, source: &[u8]) -> Vec<u8> {
    let mut packed = vec![0xaa; layout.len_bytes() as usize];
    q4k_soa::pack(layout, source, &mut packed).unwrap();
    packed
}

/// A row length that is legal for the type and as odd as can be.
pub(crate) fn odd_n_in(ty: WeightType) -> u32 {
    match ty.block_elems() {
        1 => 77,
        32 => 576,
        elems => 3 * elems,
    }
}
