//! f16 activations as matrix products on tensor cores read them: `[rows][n]`, `n` rounded up to a
//! multiple of 128; what is beyond is finite. Of four elements the second and the third are exchanged.

use half::f16;

const COLUMNS: usize = 128;

/// How the elements lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum HalfOrder {
    /// Row after row.
    Rows = 0,
    /// For at most 32 rows, as the lanes of a warp hold them; 8 rows or 32, whatever of them is used.
    Fragments = 1,
}

impl HalfOrder {
    /// Most rows in [`Self::Fragments`].
    pub const MAX_FRAGMENT_ROWS: u32 = 32;
}

/// Elements of `rows` rows in an order, by its number.
pub(super) fn half_elems(order: u64, rows: u64, n: u64) -> u64 {
    let rows = match order {
        0 => rows,
        _ if rows <= 8 => 8,
        _ => 32,
    };
    rows * n.next_multiple_of(COLUMNS as u64)
}

/// Bytes of `rows` rows of `n` elements in an order.
pub fn half_bytes(order: HalfOrder, rows: u32, n: u32) -> u64 {
    2 * half_elems(order as u64, rows.into(), n.into())
}

/// Where the elements of such rows lie.
#[derive(Clone, Copy)]
pub(super) struct HalfRows {
    n: usize,
    few: bool,
    fragments: bool,
}

impl HalfRows {
    pub(super) fn new(order: u32, n_rows: u32, n: u32) -> Self {
        Self { n: n as usize, few: n_rows <= 8, fragments: order == HalfOrder::Fragments as u32 }
    }

    pub(super) fn at(&self, row: usize, k: usize) -> usize {
        let (four, odd, second) = (k % 8 / 4, k % 2, k / 2 % 2);
        if !self.fragments {
            return row * self.n.next_multiple_of(COLUMNS) + k / 4 * 4 + odd * 2 + second;
        }
        let (a, b) = (k % 32 / 8, k % COLUMNS / 32);
        let (tile, pair) = match self.few {
            true => (k / COLUMNS * 4 + a, odd),
            false => (((k / COLUMNS * 2 + row / 16) * 4 + a) * 2 + odd, row / 8 % 2),
        };
        (tile * 8 + row % 8) * 32 + b * 8 + four * 4 + pair * 2 + second
    }

    /// Puts a row.
    pub(super) fn put(&self, row: usize, values: &[f32], to: &mut [f16]) {
        for (k, value) in values.iter().enumerate() {
            to[self.at(row, k)] = finite(*value);
        }
    }

    /// A row in f32.
    pub(super) fn get(&self, row: usize, from: &[f16]) -> Vec<f32> {
        (0..self.n).map(|k| from[self.at(row, k)].to_f32()).collect()
    }
}

/// As f16, the largest finite number in place of what is beyond.
pub(super) fn finite(value: f32) -> f16 {
    f16::from_f32(if value.is_nan() { value } else { value.clamp(-65504.0, 65504.0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_a_place_of_its_own() {
        for (order, rows, n) in [(0, 3, 200), (1, 5, 200), (1, 32, 256), (1, 9, 96)] {
            let place = HalfRows::new(order, rows, n);
            let elems = half_elems(order.into(), rows.into(), n.into()) as usize;
            let mut seen = vec![false; elems];
            for (row, k) in
                (0..rows as usize).flat_map(|row| (0..n as usize).map(move |k| (row, k)))
            {
                assert!(!std::mem::replace(&mut seen[place.at(row, k)], true));
            }
        }
    }
}
