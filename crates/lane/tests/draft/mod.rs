//! A GGUF written by hand, so that anything about it can be wrong.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

/// A metadata value.
#[derive(Clone, Debug)]
pub enum Val {
    U8(u8),
    U16(u16),
    I32(i32),
    U32(u32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Str(&'static str),
    Strs(Vec<String>),
    I32s(Vec<i32>),
    U64s(Vec<u64>),
    F32s(Vec<f32>),
    /// Type id and bytes.
    Raw(u32, Vec<u8>),
}

/// A tensor as the header describes it.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub type_id: u32,
    /// Relative to the data; `None` puts it after the tensor before.
    pub offset: Option<u64>,
}

/// A whole file.
#[derive(Clone, Debug)]
pub struct Draft {
    pub version: u32,
    pub alignment: u64,
    pub keys: Vec<(String, Val)>,
    pub tensors: Vec<Tensor>,
    /// Instead of the real number of keys.
    pub n_keys: Option<u64>,
    /// Instead of the real number of tensors.
    pub n_tensors: Option<u64>,
}

pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const Q4_K: u32 = 12;

/// Elements and bytes of the blocks that drafts use.
fn block(type_id: u32) -> (u64, u64) {
    match type_id {
        F32 => (1, 4),
        F16 => (1, 2),
        2 => (32, 18),
        8 => (32, 34),
        Q4_K => (256, 144),
        14 => (256, 210),
        _ => (1, 1),
    }
}

impl Draft {
    pub fn empty() -> Self {
        Self {
            version: 3,
            alignment: 32,
            keys: vec![],
            tensors: vec![],
            n_keys: None,
            n_tensors: None,
        }
    }

    /// A Llama of two small layers.
    pub fn llama() -> Self {
        let mut draft = Self::empty();
        let tokens = (0..8).map(|id| format!("t{id}")).collect();
        draft
            .key("general.architecture", Val::Str("llama"))
            .key("general.name", Val::Str("draft"))
            .key("llama.block_count", Val::U32(2))
            .key("llama.context_length", Val::U32(64))
            .key("llama.embedding_length", Val::U32(256))
            .key("llama.feed_forward_length", Val::U32(512))
            .key("llama.attention.head_count", Val::U32(4))
            .key("llama.attention.head_count_kv", Val::U32(2))
            .key("llama.attention.layer_norm_rms_epsilon", Val::F32(1e-5))
            .key("llama.rope.freq_base", Val::F32(10000.0))
            .key("llama.rope.dimension_count", Val::U32(64))
            .key("llama.vocab_size", Val::U32(8))
            .key("tokenizer.ggml.tokens", Val::Strs(tokens))
            .key("tokenizer.ggml.token_type", Val::I32s(vec![1; 8]))
            .tensor("token_embd.weight", &[256, 8], Q4_K)
            .tensor("output_norm.weight", &[256], F32);
        for layer in 0..2 {
            let name = |own: &str| format!("blk.{layer}.{own}.weight");
            draft
                .tensor(&name("attn_norm"), &[256], F32)
                .tensor(&name("attn_q"), &[256, 256], Q4_K)
                .tensor(&name("attn_k"), &[256, 128], Q4_K)
                .tensor(&name("attn_v"), &[256, 128], Q4_K)
                .tensor(&name("attn_output"), &[256, 256], Q4_K)
                .tensor(&name("ffn_norm"), &[256], F32)
                .tensor(&name("ffn_gate"), &[256, 512], Q4_K)
                .tensor(&name("ffn_up"), &[256, 512], Q4_K)
                .tensor(&name("ffn_down"), &[512, 256], Q4_K);
        }
        draft
    }

    /// Adds a key, or gives it another value.
    pub fn key(&mut self, key: &str, value: Val) -> &mut Self {
        match self.keys.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
        self
    }

    pub fn remove_key(&mut self, key: &str) -> &mut Self {
        let before = self.keys.len();
        self.keys.retain(|(k, _)| k != key);
        assert!(self.keys.len() < before, "{key} was there");
        self
    }

    /// Adds a tensor, or gives it another shape and type.
    pub fn tensor(&mut self, name: &str, dims: &[u64], type_id: u32) -> &mut Self {
        let tensor = Tensor { name: name.to_owned(), dims: dims.to_vec(), type_id, offset: None };
        match self.tensors.iter_mut().find(|t| t.name == name) {
            Some(old) => *old = tensor,
            None => self.tensors.push(tensor),
        }
        self
    }

    pub fn remove_tensor(&mut self, name: &str) -> &mut Self {
        let before = self.tensors.len();
        self.tensors.retain(|t| t.name != name);
        assert!(self.tensors.len() < before, "{name} was there");
        self
    }

    /// The bytes of the file; the data is zeros.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.n_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            string(&mut out, key);
            put(&mut out, value);
        }
        let mut data_bytes = 0u64;
        for tensor in &self.tensors {
            let (elems, bytes) = block(tensor.type_id);
            let n_elems = tensor.dims.iter().fold(1u64, |n, &dim| n.wrapping_mul(dim));
            let n_bytes = (n_elems / elems).wrapping_mul(bytes);
            let offset = tensor.offset.unwrap_or(data_bytes);
            string(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(offset.to_le_bytes());
            if n_bytes < 1 << 24 {
                data_bytes = (data_bytes + n_bytes).next_multiple_of(self.alignment);
            }
        }
        let header = (out.len() as u64).next_multiple_of(self.alignment);
        out.resize((header + data_bytes) as usize, 0);
        out
    }
}

pub fn string(out: &mut Vec<u8>, string: &str) {
    out.extend((string.len() as u64).to_le_bytes());
    out.extend(string.as_bytes());
}

fn put(out: &mut Vec<u8>, value: &Val) {
    let mut typed = |id: u32, bytes: &[u8]| {
        out.extend(id.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Val::U8(v) => typed(0, &v.to_le_bytes()),
        Val::U16(v) => typed(2, &v.to_le_bytes()),
        Val::U32(v) => typed(4, &v.to_le_bytes()),
        Val::I32(v) => typed(5, &v.to_le_bytes()),
        Val::F32(v) => typed(6, &v.to_le_bytes()),
        Val::Bool(v) => typed(7, &[u8::from(*v)]),
        Val::Str(v) => {
            typed(8, &[]);
            string(out, v);
        }
        Val::U64(v) => typed(10, &v.to_le_bytes()),
        Val::I64(v) => typed(11, &v.to_le_bytes()),
        Val::F64(v) => typed(12, &v.to_le_bytes()),
        Val::Raw(id, bytes) => typed(*id, bytes),
        Val::Strs(values) => {
            array(out, 8, values.len());
            values.iter().for_each(|v| string(out, v));
        }
        Val::I32s(values) => {
            array(out, 5, values.len());
            values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
        Val::U64s(values) => {
            array(out, 10, values.len());
            values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
        Val::F32s(values) => {
            array(out, 6, values.len());
            values.iter().for_each(|v| out.extend(v.to_le_bytes()));
        }
    }
}

fn array(out: &mut Vec<u8>, element: u32, len: usize) {
    out.extend(9u32.to_le_bytes());
    out.extend(element.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}
