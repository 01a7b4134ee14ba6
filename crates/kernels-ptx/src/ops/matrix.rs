//! Weight matrices as kernel arguments: base address, GGUF type, rows. The planes lie where
//! [`PackedLayout::planes`] says, which the CUDA side recomputes.

use q4k_soa::{ArrangedQ8, PackedLayout, PackedMatrix, Q8Group, Shape, WeightType, quantize_q8};

use crate::params::ParamError;
use crate::table::Kernel;

/// Bytes of a matrix in the planes layout; a combination that cannot be packed asks for more
/// than any buffer has, so recording it fails.
pub(crate) fn packed_bytes(ggml_type: u64, n_out: u64, n_in: u64) -> u64 {
    if n_out == 0 {
        return 0;
    }
    layout(ggml_type as u32, n_out as u32, n_in as u32).map_or(u64::MAX, |l| l.len_bytes())
}

fn layout(ggml_type: u32, n_out: u32, n_in: u32) -> Option<PackedLayout> {
    PackedLayout::planes(WeightType::from_ggml_id(ggml_type)?, Shape { n_out, n_in }).ok()
}

/// The matrix behind an argument.
pub(crate) fn bind_matrix<'a>(
    kernel: Kernel,
    param: &'static str,
    bytes: &'a [u8],
    ggml_type: u32,
    n_out: u32,
    n_in: u32,
) -> Result<PackedMatrix<'a>, ParamError> {
    layout(ggml_type, n_out, n_in)
        .and_then(|layout| PackedMatrix::new(layout, bytes).ok())
        .ok_or(ParamError::Mismatch { kernel: kernel.name(), param })
}

/// Up to three matrices that share an input: q, k and v; gate and up. Their rows follow each
/// other in the output.
pub(crate) struct Parts<'a> {
    parts: [Option<PackedMatrix<'a>>; 3],
}

impl<'a> Parts<'a> {
    pub(crate) fn bind(
        kernel: Kernel,
        parts: [(Option<&'a [u8]>, u32, u32); 3],
        n_in: u32,
    ) -> Result<Self, ParamError> {
        const NAMES: [&str; 3] = ["w0", "w1", "w2"];
        let mut bound = [const { None }; 3];
        for (index, (bytes, ggml_type, n_out)) in parts.into_iter().enumerate() {
            if let Some(bytes) = bytes.filter(|_| n_out > 0) {
                bound[index] =
                    Some(bind_matrix(kernel, NAMES[index], bytes, ggml_type, n_out, n_in)?);
            } else if n_out > 0 {
                return Err(ParamError::Mismatch { kernel: kernel.name(), param: NAMES[index] });
            }
        }
        Ok(Self { parts: bound })
    }

    /// Each run of `rows` that lies in one matrix: the matrix, its own row range, and where
    /// the run starts within `rows`.
    pub(crate) fn for_rows(
        &self,
        rows: std::ops::Range<u32>,
        mut f: impl FnMut(&PackedMatrix<'a>, std::ops::Range<u32>, usize),
    ) {
        let mut first = 0;
        for matrix in self.parts.iter().flatten() {
            let end = first + matrix.layout().shape().n_out;
            let (from, to) = (rows.start.max(first), rows.end.min(end));
            if from < to {
                f(matrix, from - first..to - first, (from - rows.start) as usize);
            }
            first = end;
        }
    }
}

impl Parts<'_> {
    /// The products of some of the rows with a q8 vector.
    pub(crate) fn rows_dot_q8(
        &self,
        rows: std::ops::Range<u32>,
        x: &ArrangedQ8<'_>,
        out: &mut [f32],
    ) {
        self.for_rows(rows, |matrix, rows, at| {
            let len = rows.len();
            x.rows_dot(matrix, rows, &mut out[at..at + len]);
        });
    }
}

/// One token's activations in q8.
pub(crate) struct Q8Vector {
    quants: Vec<i8>,
    groups: Vec<Q8Group>,
}

impl Q8Vector {
    /// Of `x`.
    pub(crate) fn of(x: &[f32]) -> Self {
        let mut q8 = Self::empty(x.len());
        quantize_q8(x, &mut q8.quants, &mut q8.groups);
        q8
    }

    /// Of the RMS norm of `x`.
    pub(crate) fn of_norm(x: &[f32], weight: &[f32], eps: f32) -> Self {
        let mut q8 = Self::empty(x.len());
        super::rms_norm_q8::norm(x, weight, eps, &mut q8.quants, &mut q8.groups);
        q8
    }

    pub(crate) fn arranged(&self) -> ArrangedQ8<'_> {
        ArrangedQ8::new(&self.quants, &self.groups)
    }

    fn empty(n: usize) -> Self {
        Self { quants: vec![0; n], groups: vec![Q8Group::default(); n / 32] }
    }
}

/// Whether the weights of a type come in groups with scales: what the kernels that quantise their
/// own input are made for.
pub fn is_grouped(ty: WeightType) -> bool {
    ty.block_elems() >= 32
}

/// Refuses matrices whose weights do not come in groups.
pub(crate) fn expect_grouped(
    kernel: Kernel,
    param: &'static str,
    ggml_type: u32,
) -> Result<(), ParamError> {
    if WeightType::from_ggml_id(ggml_type).is_some_and(is_grouped) {
        return Ok(());
    }
    Err(ParamError::Value {
        kernel: kernel.name(),
        param,
        value: ggml_type.into(),
        reason: "must be a type whose weights come in groups",
    })
}

/// Rows per task of the host's thread pool: at least this many bytes of weights, so that
/// handing out a task costs little beside it.
const TASK_BYTES: u64 = 16 << 10;

/// Rows that one task should take of matrices with rows of `row_bytes`.
pub(crate) fn rows_per_task(n_rows: u32, n_in: u32) -> usize {
    let rows = (TASK_BYTES / (u64::from(n_in) / 2).max(1)).max(1);
    rows.min(u64::from(n_rows).max(1)) as usize
}
