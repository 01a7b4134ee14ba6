//! The one table of kernels: name, signature, version, twin.

use crate::ops;
use crate::params::{Param, ParamError, TwinArgs};

type Twin = fn(Kernel, TwinArgs<'_>) -> Result<(), ParamError>;

/// A row of the table.
struct Row {
    name: &'static str,
    source: &'static str,
    version: u32,
    params: &'static [Param],
    twin: Twin,
}

macro_rules! kernels {
    ($( $(#[$doc:meta])* $variant:ident = $name:ident : $op:ident v $version:literal, )*) => {
        /// A kernel of the table, which is one `.entry` of the PTX.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Kernel { $( $(#[$doc])* $variant, )* }

        impl Kernel {
            /// Every kernel, in the order of the table.
            pub const ALL: &[Kernel] = &[ $( Kernel::$variant, )* ];

            fn row(self) -> &'static Row {
                match self {
                    $( Kernel::$variant => {
                        const ROW: Row = Row {
                            name: stringify!($name),
                            source: stringify!($op),
                            version: $version,
                            params: ops::$op::PARAMS,
                            twin: ops::$op::twin,
                        };
                        &ROW
                    } )*
                }
            }
        }
    };
}

kernels! {
    /// Row gather from a quantised embedding matrix.
    Embed = embed: embed v 1,
    /// Gather of the rows that have outputs.
    GatherRows = gather_rows: gather_rows v 1,
    /// RMS norm, f32 out.
    RmsNorm = rms_norm: rms_norm v 1,
    /// RMS norm, plus residual.
    RmsNormAdd = rms_norm_add: rms_norm_add v 1,
    /// RMS norm, q8 out.
    RmsNormQ8 = rms_norm_q8: rms_norm_q8 v 1,
    /// RMS norm, or nothing, f16 out.
    RmsNormF16 = rms_norm_f16: rms_norm_f16 v 1,
    /// f32 to q8.
    QuantizeQ8 = quantize_q8: quantize_q8 v 1,
    /// Matrix × q8 vector.
    GemvQ8Store = gemv_q8_store: gemv_q8 v 1,
    /// Matrix × q8 vector, plus residual.
    GemvQ8Add = gemv_q8_add: gemv_q8 v 1,
    /// SwiGLU of two matrices × q8 vector.
    GemvQ8Swiglu = gemv_q8_swiglu: gemv_q8 v 1,
    /// GeGLU of two matrices × q8 vector.
    GemvQ8Geglu = gemv_q8_geglu: gemv_q8 v 1,
    /// RMS norm, matrices × its result in q8.
    GemvNorm = gemv_norm: gemv_norm v 2,
    /// RMS norm, SwiGLU of two matrices × its result in q8.
    GemvNormSwiglu = gemv_norm_swiglu: gemv_norm_swiglu v 2,
    /// Matrix × vector to be quantised, plus residual.
    GemvResidual = gemv_residual: gemv_residual v 2,
    /// Matrices × up to 8 f16 vectors.
    GemmSkinny8 = gemm_skinny_8: gemm_skinny v 1,
    /// Matrices × 9 to 32 f16 vectors.
    GemmSkinny32 = gemm_skinny_32: gemm_skinny v 1,
    /// Matrices × many f16 vectors.
    GemmTiled = gemm_tiled: gemm_tiled v 1,
    /// Matrix × f32 vector.
    GemvF32Store = gemv_f32_store: gemv_f32 v 1,
    /// Matrix × f32 vector, plus residual.
    GemvF32Add = gemv_f32_add: gemv_f32 v 1,
    /// SwiGLU of two matrices × f32 vector.
    GemvF32Swiglu = gemv_f32_swiglu: gemv_f32 v 1,
    /// GeGLU of two matrices × f32 vector.
    GemvF32Geglu = gemv_f32_geglu: gemv_f32 v 1,
    /// RoPE, and append to an f32 KV cache.
    RopeAppendF32 = rope_append_f32: rope_append v 2,
    /// RoPE, and append to an f16 KV cache.
    RopeAppendF16 = rope_append_f16: rope_append v 2,
    /// RoPE, and append to a q8 KV cache.
    RopeAppendQ8 = rope_append_q8: rope_append v 2,
    /// Attention over one segment of an f32 KV cache per block.
    AttentionF32 = attention_f32: attention v 2,
    /// Attention over one segment of an f16 KV cache per block.
    AttentionF16 = attention_f16: attention v 2,
    /// Attention over one segment of a q8 KV cache per block.
    AttentionQ8 = attention_q8: attention v 2,
    /// Attention of runs of tokens, heads of up to 64 elements.
    AttentionChunk64 = attention_chunk_64: attention_chunk v 1,
    /// Attention of runs of tokens, heads of up to 128 elements.
    AttentionChunk128 = attention_chunk_128: attention_chunk v 1,
    /// Attention of runs of tokens, heads of up to 256 elements.
    AttentionChunk256 = attention_chunk_256: attention_chunk v 1,
    /// Attention of rows over an f16 KV cache, f16 out.
    AttentionRows = attention_rows: attention_rows v 1,
    /// Sum of the segments of an attention.
    AttentionCombine = attention_combine: attention_combine v 1,
    /// RoPE, append to an f32 KV cache, and attention of one token.
    AttentionStepF32 = attention_step_f32: attention_step v 1,
    /// RoPE, append to an f16 KV cache, and attention of one token.
    AttentionStepF16 = attention_step_f16: attention_step v 1,
    /// Takes the likeliest token, and makes it the input of the next step.
    Argmax = argmax: argmax v 2,
    /// RMS norm, logits, the likeliest token, and the input of the next step.
    Head = head: head v 2,
    /// Draws the next token from the logits, and makes it the input of the next step.
    Sample = sample: sample v 3,
    /// Reads a buffer: what a measurement takes for the device's best.
    ReadBandwidth = read_bandwidth: read_bandwidth v 1,
    /// The whole step of one token.
    Persistent = persistent_sm90: persistent_sm90 v 1,
}

impl Kernel {
    /// Name of the `.entry`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Name of the operation: `cu/<source>.cu` and `src/ops/<source>.rs`.
    pub fn source(self) -> &'static str {
        self.row().source
    }

    /// Bumped whenever the meaning of a result changes; part of the graph key.
    pub fn version(self) -> u32 {
        self.row().version
    }

    /// The signature.
    pub fn params(self) -> &'static [Param] {
        self.row().params
    }

    /// Looks a kernel up by the name of its `.entry`.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kernel| kernel.name() == name)
    }

    /// Lowest compute capability of a device that runs it, major × 10 + minor.
    pub fn compute_capability(self) -> u32 {
        if self.source().ends_with("_sm90") { 90 } else { 80 }
    }

    /// Runs the CPU twin: the same function of the same arguments as the CUDA kernel.
    pub fn run_twin(self, args: TwinArgs<'_>) -> Result<(), ParamError> {
        (self.row().twin)(self, args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_found() {
        let names: HashSet<_> = Kernel::ALL.iter().map(|k| k.name()).collect();
        assert_eq!(names.len(), Kernel::ALL.len());
        for &kernel in Kernel::ALL {
            assert_eq!(Kernel::by_name(kernel.name()), Some(kernel));
            assert!(kernel.name().starts_with(kernel.source()));
        }
        assert_eq!(Kernel::by_name("no_such_kernel"), None);
    }

    #[test]
    fn a_missing_argument_is_an_error_of_every_twin() {
        for &kernel in Kernel::ALL {
            let error = kernel.run_twin(TwinArgs::new()).unwrap_err();
            assert!(matches!(error, ParamError::Mismatch { .. }), "{error}");
        }
    }
}
