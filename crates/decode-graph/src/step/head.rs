//! From the last hidden state to the next token.

use gpu_slab::View;
use kernels_ptx::{Geometry, Kernel, ops};

use super::products::{Epilogue, Matrices};
use super::{RecordError, Recorder, expect};
use crate::launch::Launch;
use crate::plan::{Head, ModelWeights, WeightRef};

impl Recorder<'_> {
    pub(super) fn head(&mut self, weights: &ModelWeights) -> Result<(), RecordError> {
        let (plan, arena) = (self.plan, self.arena);
        if plan.head == Head::None {
            return Ok(());
        }
        // Nobody reads `hidden_b` any more.
        let hidden = match plan.n_tokens {
            1 => arena.hidden_a,
            _ => self.gather_outputs(arena.hidden_a, arena.hidden_b)?,
        };
        let (outputs, numerics) = (plan.n_outputs, plan.numerics);
        expect("rows of the output", plan.dims.n_vocab.into(), weights.output.shape.n_out.into())?;
        let (output, norm) = ([weights.output], weights.output_norm);
        if self.fuses(&output, plan.n_tokens, numerics) {
            if plan.head == Head::Greedy {
                return self.greedy_head(weights.output, hidden, norm);
            }
            self.gemv_norm("logits", &output, hidden, norm, None, arena.logits)?;
        } else {
            let input = self.norm("output norm", hidden, norm, outputs, numerics)?;
            self.gemv("logits", &output, input, None, Epilogue::Store, arena.logits, outputs)?;
        }
        self.choose_and_advance()
    }

    /// The rows that have outputs.
    fn gather_outputs(&mut self, x: View, y: View) -> Result<View, RecordError> {
        let (plan, rows) = (self.plan, self.arena.outputs);
        let (n_tokens, n_rows, n) = (plan.n_tokens, plan.n_outputs, plan.dims.n_embd);
        let args = ops::gather_rows::Args { x, rows, y, n_tokens, n_rows, n };
        launch!(self, "rows with outputs", Kernel::GatherRows, args);
        Ok(y)
    }

    /// Logits, the likeliest token, and the step's own advance.
    fn greedy_head(&mut self, output: WeightRef, x: View, norm: View) -> Result<(), RecordError> {
        let (plan, arena) = (self.plan, self.arena);
        let Matrices { types, rows, n_in } = self.matrices("logits", &[output])?;
        let product = ops::gemv_residual::product(types[0], rows[0], n_in, self.device);
        let args = ops::head::Args {
            w: output.view,
            x,
            norm,
            logits: arena.logits,
            best: arena.best,
            arrivals: self.choice_arrivals()?,
            token: arena.token,
            tokens: arena.tokens,
            step_count: arena.step_count,
            ggml_type: types[0],
            n_vocab: rows[0],
            n_in,
            ring_bytes: product.ring_bytes,
            max_context_tokens: plan.kv.max_context_tokens(),
            eps: plan.norm_eps,
        };
        launch!(self, "logits and argmax", Kernel::Head, args);
        Ok(())
    }

    /// The token from the logits, and the step's own advance.
    pub(super) fn choose_and_advance(&mut self) -> Result<(), RecordError> {
        let (plan, arena) = (self.plan, self.arena);
        let (n_vocab, n_tokens, n_outputs) = (plan.dims.n_vocab, plan.n_tokens, plan.n_outputs);
        let outputs = arena.outputs;
        let (token, tokens, step_count) = (arena.token, arena.tokens, arena.step_count);
        let max_context_tokens = plan.kv.max_context_tokens();
        if plan.head == Head::Greedy {
            let args = ops::argmax::Args {
                logits: arena.logits,
                outputs,
                best: arena.best,
                arrivals: self.choice_arrivals()?,
                token,
                tokens,
                step_count,
                n_vocab,
                n_tokens,
                n_outputs,
                max_context_tokens,
            };
            launch!(self, "argmax", Kernel::Argmax, args);
        } else {
            let args = ops::sample::Args {
                logits: arena.logits,
                outputs,
                sampling: arena.sampling,
                tokens,
                step_count,
                token,
                n_vocab,
                n_tokens,
                n_outputs,
                max_context_tokens,
            };
            launch!(self, "sample", Kernel::Sample, args);
        }
        Ok(())
    }

    /// The counters behind those of the attention.
    fn choice_arrivals(&self) -> Result<View, RecordError> {
        let at = u64::from(self.plan.dims.n_kv_head) * 4;
        let bytes = u64::from(self.plan.n_outputs) * 4;
        self.slice("arrivals", self.arena.arrivals, at..at + bytes)
    }
}
