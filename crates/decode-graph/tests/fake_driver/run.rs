//! What a stream does: copies, fills, and kernels as their CPU twins.

use std::collections::HashMap;

use kernels_ptx::ops::{GemmForm, HalfOrder, half_bytes};
use kernels_ptx::{
    Access, Arg, Candidate, Elem, Kernel, ParamError, ParamKind, SamplingPack, ScalarType, Slice,
    TwinArgs,
};
use kv_paged::{KvLayout, KvType, PagedKvConfig};
use q4k_soa::{PackedLayout, Q8Group, Shape, WeightType};

use crate::memory::Memory;
use crate::state::{Code, ILLEGAL_ADDRESS};

const MISALIGNED_ADDRESS: Code = 716;
const LAUNCH_FAILED: Code = 719;

/// A piece of work.
#[derive(Clone)]
pub(crate) enum Node {
    Kernel(Launched),
    Copy { to: u64, from: u64, len: usize, host: bool },
    Fill { to: u64, pattern: [u8; 4], len: usize },
}

/// A kernel with the values of its arguments.
#[derive(Clone)]
pub(crate) struct Launched {
    pub(crate) kernel: Kernel,
    pub(crate) words: Vec<u64>,
}

impl Node {
    pub(crate) fn run(&self, memory: &Memory) -> Result<(), Code> {
        match self {
            Node::Kernel(launch) => launch.run(memory),
            &Node::Copy { to, from, len, host } => {
                for address in [to, from] {
                    if !host || memory.check_pinned(address, len).is_err() {
                        memory.check_device(address, len)?;
                    }
                }
                // SAFETY: both ranges are live, as just checked.
                unsafe { (to as *mut u8).copy_from(from as *const u8, len) };
                Ok(())
            }
            &Node::Fill { to, pattern, len } => {
                memory.check_device(to, len)?;
                // SAFETY: live device memory, which nothing else touches while the driver's lock
                // is held.
                let bytes = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, len) };
                for (byte, value) in bytes.iter_mut().zip(pattern.into_iter().cycle()) {
                    *byte = value;
                }
                Ok(())
            }
        }
    }
}

impl Launched {
    fn run(&self, memory: &Memory) -> Result<(), Code> {
        let params = self.kernel.params();
        let scalars: HashMap<&str, u64> = params
            .iter()
            .zip(&self.words)
            .filter(|(param, _)| matches!(param.kind, ParamKind::Scalar(_)))
            .map(|(param, word)| (param.name, *word))
            .collect();
        let mut args = TwinArgs::new();
        for (param, &word) in params.iter().zip(&self.words) {
            args.push(match param.kind {
                ParamKind::Scalar(ScalarType::U32) => Arg::U32(word as u32),
                ParamKind::Scalar(ScalarType::F32) => Arg::F32(f32::from_bits(word as u32)),
                ParamKind::Buffer { optional: true, .. } if word == 0 => Arg::Null,
                ParamKind::Buffer { access, elem, .. } => {
                    let elems = Expression::value(param.shape, &scalars);
                    let len = usize::try_from(elems).ok().and_then(|n| n.checked_mul(size(elem)));
                    let len = len.ok_or(ILLEGAL_ADDRESS)?;
                    memory.check_device(word, len)?;
                    let start = word as *mut u8;
                    // SAFETY: live device memory, which nothing else touches while the driver's
                    // lock is held; what a kernel writes overlaps none of its other buffers.
                    Arg::Buffer(unsafe {
                        match access {
                            Access::Read => Slice::Shared(std::slice::from_raw_parts(start, len)),
                            Access::Write | Access::Update => {
                                Slice::Exclusive(std::slice::from_raw_parts_mut(start, len))
                            }
                        }
                    })
                }
            });
        }
        self.kernel.run_twin(args).map_err(|error| match error {
            ParamError::Misaligned { .. } => MISALIGNED_ADDRESS,
            _ => LAUNCH_FAILED,
        })
    }
}

fn size(elem: Elem) -> usize {
    match elem {
        Elem::U8 | Elem::I8 => 1,
        Elem::F16 => 2,
        Elem::U32 | Elem::F32 => 4,
        Elem::F64 => 8,
        Elem::Q8Group => size_of::<Q8Group>(),
        Elem::Candidate => size_of::<Candidate>(),
        Elem::SamplingPack => size_of::<SamplingPack>(),
    }
}

/// A shape of the signature table, read from left to right.
struct Expression<'a> {
    rest: &'a str,
    scalars: &'a HashMap<&'a str, u64>,
}

impl Expression<'_> {
    fn value(text: &str, scalars: &HashMap<&str, u64>) -> u64 {
        let mut expression = Expression { rest: text, scalars };
        let value = expression.sum();
        assert!(expression.rest.trim().is_empty(), "{text} is no shape");
        value
    }

    fn next(&mut self, symbol: char) -> bool {
        let rest = self.rest.trim_start();
        let found = rest.strip_prefix(symbol);
        self.rest = found.unwrap_or(rest);
        found.is_some()
    }

    fn sum(&mut self) -> u64 {
        let mut value = self.product();
        while self.next('+') {
            value += self.product();
        }
        value
    }

    fn product(&mut self) -> u64 {
        let mut value = self.operand();
        loop {
            if self.next('*') {
                value *= self.operand();
            } else if self.next('/') {
                value /= self.operand();
            } else {
                return value;
            }
        }
    }

    fn operand(&mut self) -> u64 {
        if self.next('(') {
            let value = self.sum();
            assert!(self.next(')'), "a parenthesis stays open before {}", self.rest);
            return value;
        }
        let word_end = |c: char| !c.is_alphanumeric() && c != '_';
        let len = self.rest.find(word_end).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(len);
        self.rest = rest;
        if let Ok(number) = word.parse() {
            return number;
        }
        if word == "packed_bytes" {
            let [ggml_type, n_out, n_in] = self.numbers(word);
            return packed_bytes(ggml_type as u32, n_out as u32, n_in as u32);
        }
        if word == "half_elems" {
            let [order, rows, n] = self.numbers(word);
            return half_elems(order, rows, n);
        }
        if word == "residual_elems" {
            let [form, n_tokens, n_out @ ..]: [u64; 5] = self.numbers(word);
            let added = form == u64::from(GemmForm::Add as u32);
            return if added { n_tokens * n_out.iter().sum::<u64>() } else { 0 };
        }
        if word == "out_bytes" {
            let [form, order, n_tokens, n_out @ ..]: [u64; 6] = self.numbers(word);
            let gated = form > u64::from(GemmForm::Add as u32);
            let floats = n_tokens * n_out.iter().sum::<u64>();
            return if gated { 2 * half_elems(order, n_tokens, n_out[0]) } else { 4 * floats };
        }
        if word == "tables" && self.next(':') && self.next(':') {
            self.rest =
                self.rest.trim_start().strip_prefix("entries").expect("a function of tables");
            let [n_sequences, table_stride, n_logical] = self.numbers("entries");
            return n_sequences.saturating_sub(1) * table_stride + n_logical;
        }
        if word == "cache" && self.next(':') && self.next(':') {
            self.rest = self.rest.trim_start().strip_prefix("bytes").expect("a function of cache");
            let [n_blocks, n_kv_head, block_size, head_dim, elem_bytes] = self.numbers("bytes");
            let [n_kv_head, block_size, head_dim] =
                [n_kv_head, block_size, head_dim].map(|number| number as u32);
            let types = [KvType::F32, KvType::F16, KvType::Q8];
            let kv_type = types.into_iter().find(|ty| ty.elem_bytes() == elem_bytes);
            let layout = PagedKvConfig::new(1, n_kv_head, head_dim, block_size)
                .and_then(|config| config.with_block_size(block_size))
                .and_then(|config| config.with_kv_type(kv_type.expect("a cached type")))
                .and_then(|config| KvLayout::with_blocks(&config, n_blocks as u32));
            return layout.expect("a cache").total_bytes();
        }
        self.scalars.get(word).copied().unwrap_or_else(|| panic!("{word} is no scalar"))
    }

    /// Arguments of a function; those in brackets are arguments like the others.
    fn numbers<const N: usize>(&mut self, function: &str) -> [u64; N] {
        assert!(self.next('('), "{function} has arguments");
        let numbers = std::array::from_fn(|index| {
            assert!(index == 0 || self.next(','), "{function} takes {N} numbers");
            self.next('[');
            let number = self.sum();
            self.next(']');
            number
        });
        assert!(self.next(')'), "{function} takes {N} numbers");
        numbers
    }
}

fn half_elems(order: u64, rows: u64, n: u64) -> u64 {
    let order = if order == 0 { HalfOrder::Rows } else { HalfOrder::Fragments };
    half_bytes(order, rows as u32, n as u32) / 2
}

fn packed_bytes(ggml_type: u32, n_out: u32, n_in: u32) -> u64 {
    if n_out == 0 {
        return 0;
    }
    let ty = WeightType::from_ggml_id(ggml_type);
    ty.and_then(|ty| PackedLayout::planes(ty, Shape { n_out, n_in }).ok())
        .map_or(u64::MAX, |layout| layout.len_bytes())
}
