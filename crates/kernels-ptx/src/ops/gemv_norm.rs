//! RMS norm of one vector, and up to three matrices times it: with u = the norm of `x` in q8, see
//! [`super::rms_norm_q8`], `out = [w0; w1; w2] · u + bias`.

use super::gemv_q8::{Epilogue, Form};
use super::matrix::{Parts, Q8Vector, expect_grouped, packed_bytes};
use crate::geometry::{DeviceProfile, Geometry, VectorProduct};
use crate::params::{ParamError, TwinArgs, kernel_params};
use crate::table::Kernel;

kernel_params! {
    buffers {
        /// First matrix, of a type whose weights come in groups.
        read w0: u8 [packed_bytes(type0, n_out0, n_in)],
        /// Second matrix, if any.
        maybe w1: u8 [packed_bytes(type1, n_out1, n_in)],
        /// Third matrix, if any.
        maybe w2: u8 [packed_bytes(type2, n_out2, n_in)],
        /// `[n_in]`.
        read x: f32 [n_in],
        /// `[n_in]`, the norm's weights.
        read norm: f32 [n_in],
        /// One value per row of all matrices.
        maybe bias: f32 [n_out0 + n_out1 + n_out2],
        /// One value per row of all matrices.
        write out: f32 [n_out0 + n_out1 + n_out2],
    }
    scalars {
        /// GGUF type of the first matrix.
        type0: u32,
        /// GGUF type of the second.
        type1: u32,
        /// GGUF type of the third.
        type2: u32,
        /// Rows of the first.
        n_out0: u32,
        /// Rows of the second, 0 if there is none.
        n_out1: u32,
        /// Rows of the third, 0 if there is none.
        n_out2: u32,
        /// Blocks that share the rows of the first, see [`blocks`].
        blocks0: u32,
        /// Blocks that share the rows of the second.
        blocks1: u32,
        /// Blocks that share the rows of the third.
        blocks2: u32,
        /// Input length.
        n_in: u32,
        /// See [`product`].
        ring_bytes: u32,
        /// Added to the mean square.
        eps: f32,
    }
}

impl<B> Args<B> {
    /// The blocks of every matrix.
    pub fn geometry(&self, device: &DeviceProfile) -> Geometry {
        let matrices =
            [(self.type0, self.n_out0), (self.type1, self.n_out1), (self.type2, self.n_out2)];
        let blocks = [self.blocks0, self.blocks1, self.blocks2];
        product(matrices, blocks, self.n_in, device).geometry()
    }
}

/// How the matrices `(type, rows)` are shared out among so many blocks for each.
pub fn product(
    matrices: [(u32, u32); 3],
    blocks: [u32; 3],
    n_in: u32,
    device: &DeviceProfile,
) -> VectorProduct {
    let there = || matrices.iter().zip(blocks).filter(|(_, blocks)| *blocks > 0);
    let types: Vec<u32> = there().map(|((ty, _), _)| *ty).collect();
    let rows_of_block = there().map(|((_, rows), blocks)| rows.div_ceil(blocks)).max().unwrap_or(1);
    VectorProduct::new(n_in, &types, 1, blocks.iter().sum(), rows_of_block, device)
}

/// Blocks for each of the matrices `(type, rows)`, in proportion to their bytes: a block works on
/// one matrix, so that its loads never change their kind. A matrix without rows gets none.
pub fn blocks(matrices: [(u32, u32); 3], n_in: u32, device: &DeviceProfile) -> [u32; 3] {
    let bytes = matrices
        .map(|(ggml_type, n_out)| packed_bytes(ggml_type.into(), n_out.into(), n_in.into()) as f64);
    let rows: u32 = matrices.iter().map(|(_, n_out)| n_out).sum();
    let n_blocks = f64::from(VectorProduct::blocks(rows, device));
    let total: f64 = bytes.iter().sum();
    let (mut before, mut end) = (0.0, 0);
    let mut index = 0;
    bytes.map(|bytes| {
        let first = end;
        before += bytes;
        if bytes > 0.0 {
            end = ((n_blocks * before / total).round() as u32).max(first + 1);
        }
        let n_out = matrices[index].1;
        index += 1;
        (end - first).min(n_out)
    })
}

pub(crate) fn twin(kernel: Kernel, args: TwinArgs<'_>) -> Result<(), ParamError> {
    let a = Bound::bind(kernel, args)?;
    let matrices =
        [(Some(a.w0), a.type0, a.n_out0), (a.w1, a.type1, a.n_out1), (a.w2, a.type2, a.n_out2)];
    for ((_, ggml_type, n_out), param) in matrices.iter().zip(["type0", "type1", "type2"]) {
        if *n_out > 0 {
            expect_grouped(kernel, param, *ggml_type)?;
        }
    }
    let parts = Parts::bind(kernel, matrices, a.n_in)?;
    let q8 = Q8Vector::of_norm(a.x, a.norm, a.eps);
    let x = q8.arranged();
    let n_rows = a.out.len() as u32;
    let epilogue = Epilogue { form: Form::Store, bias: a.bias, n_rows };
    epilogue.run(a.out, a.n_in, |_, rows, out| parts.rows_dot_q8(rows, &x, out));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_bytes_and_every_matrix_has_one() {
        let h200 = DeviceProfile { sm_count: 132, compute_capability: 90, ..DeviceProfile::A2000 };
        let (q4_k, q6_k) = (12, 14);
        // Q, k and v of Llama 3.2 3B.
        assert_eq!(blocks([(q4_k, 3072), (q4_k, 1024), (q4_k, 1024)], 3072, &h200), [158, 53, 53]);
        assert_eq!(blocks([(q4_k, 3072), (q4_k, 1024), (q6_k, 1024)], 3072, &h200), [145, 48, 71]);
        assert_eq!(blocks([(q4_k, 5), (0, 0), (q4_k, 3)], 256, &h200).iter().sum::<u32>(), 2);
        let one = DeviceProfile { sm_count: 1, ..h200 };
        assert_eq!(blocks([(q4_k, 9000), (q4_k, 2), (q4_k, 1)], 256, &one), [2, 1, 1]);
    }
}
