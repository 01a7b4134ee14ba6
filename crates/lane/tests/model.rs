//! Models from files: described when they are whole, refused by name when they are not.

mod draft;

use draft::{Draft, F16, F32, Q4_K, Val};
use lane::gguf::{GgmlType, Gguf};
use lane::model::{
    Activation, Architecture, Model, ModelError, RopePairing, RopeScaling, TensorRef, scan_scales,
};
use lane::synth::{self, Mix, Shape};
use q4k_soa::WeightType;

static WHALE: &[u8] = include_bytes!("../models/whale-5.8m-q4_k_m.gguf");

fn model(draft: &Draft) -> Result<Model, ModelError> {
    Model::from_gguf(&Gguf::from_vec(draft.bytes())?)
}

/// The draft of a Llama after `change`, which has to be refused.
fn refused(change: impl FnOnce(&mut Draft)) -> ModelError {
    let mut draft = Draft::llama();
    change(&mut draft);
    let error = model(&draft).unwrap_err();
    assert!(!error.to_string().contains('\n'));
    error
}

#[test]
fn the_whale() {
    let gguf = Gguf::from_static(WHALE).unwrap();
    let model = Model::from_gguf(&gguf).unwrap();
    let config = &model.config;
    assert_eq!(config.arch, Architecture::Llama);
    assert_eq!(config.name, "whale-union 5.8M");
    assert_eq!((config.n_layer, config.n_embd, config.n_ff), (6, 256, 768));
    assert_eq!((config.n_head, config.n_kv_head, config.head_dim), (4, 2, 64));
    assert_eq!((config.n_vocab, config.context_length), (4096, 512));
    assert_eq!((config.norm_eps, config.embedding_scale), (1e-5, 1.0));
    assert_eq!((config.q_elems(), config.kv_elems()), (256, 128));
    assert_eq!((config.rope.dims, config.rope.base), (64, 10000.0));
    assert_eq!(config.rope.pairing, RopePairing::Adjacent);
    assert_eq!(config.rope.scaling, RopeScaling::None);
    assert!(model.tied_output() && model.rope_freqs.is_none());
    assert!(model.extra_tensors.is_empty());
    assert_eq!(model.layers.len(), 6);
    assert_eq!(model.embed.ty, WeightType::Q6K);
    assert_eq!(model.layers[2].v.ty, WeightType::Q6K);
    assert_eq!(model.layers[2].down.info(&gguf).name(), "blk.2.ffn_down.weight");
    assert_eq!((model.layers[2].down.n_out, model.layers[2].down.n_in), (256, 768));
    assert_eq!(model.label(), "llama 5.8M Q4_K - Medium");
    assert_eq!(model.matrices().count(), 1 + 6 * 7);
    assert_eq!(model.vectors().count(), 1 + 6 * 2);

    // Everything in the file is read for a token, and one row of the embedding twice.
    let all: u64 = gguf.tensors().iter().map(|tensor| tensor.n_bytes()).sum();
    assert_eq!(model.bytes_per_token(), all + 210);
    for matrix in model.matrices() {
        assert_eq!(matrix.n_bytes(), matrix.info(&gguf).n_bytes());
        let scan = scan_scales(&gguf, &matrix).unwrap();
        assert!(scan.n_scales > 0);
        assert_eq!(scan.non_finite, 0);
    }
}

#[test]
fn untied_output_and_rope_factors() {
    let mut draft = Draft::llama();
    draft.tensor("output.weight", &[256, 8], 14).tensor("rope_freqs.weight", &[32], F32);
    let model = model(&draft).unwrap();
    assert!(!model.tied_output());
    assert_eq!((model.output.ty, model.embed.ty), (WeightType::Q6K, WeightType::Q4K));
    assert_eq!(model.rope_freqs.unwrap().n_elems, 32);
    // The output whole, and one row of the embedding.
    let layers: u64 =
        model.layers.iter().flat_map(|layer| layer.matrices()).map(|m| m.n_bytes()).sum();
    let vectors = 4 * (256 * 5 + 32);
    assert_eq!(model.bytes_per_token(), layers + vectors + 8 * 210 + 144);
}

#[test]
fn what_the_file_does_not_say() {
    let mut draft = Draft::llama();
    for key in [
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "vocab_size",
    ] {
        draft.remove_key(&format!("llama.{key}"));
    }
    draft.remove_key("general.name").remove_key("tokenizer.ggml.tokens");
    for layer in 0..2 {
        for own in ["attn_k", "attn_v"] {
            draft.tensor(&format!("blk.{layer}.{own}.weight"), &[256, 256], Q4_K);
        }
    }
    let model = model(&draft).unwrap();
    assert_eq!((model.config.n_kv_head, model.config.head_dim), (4, 64));
    assert_eq!((model.config.rope.dims, model.config.rope.base), (64, 10000.0));
    assert_eq!((model.config.norm_eps, model.config.name.as_str()), (1e-5, "llama"));
    assert_eq!(model.label(), "llama 1.3M");
}

#[test]
fn keys_of_other_widths_and_per_layer_lists() {
    let mut draft = Draft::llama();
    draft
        .key("llama.block_count", Val::I32(2))
        .key("llama.embedding_length", Val::U64(256))
        .key("llama.context_length", Val::I64(64))
        .key("llama.attention.head_count_kv", Val::I32s(vec![2, 2]))
        .key("llama.rope.freq_base", Val::U32(10000));
    assert_eq!(model(&draft).unwrap().config.n_kv_head, 2);
    let error = refused(|draft| {
        draft.key("llama.attention.head_count_kv", Val::I32s(vec![2, 4]));
    });
    assert!(matches!(error, ModelError::UnsupportedFeature { .. }), "{error}");
}

#[test]
fn missing_keys() {
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
    ] {
        let error = refused(|draft| {
            draft.remove_key(key);
        });
        assert!(matches!(&error, ModelError::MissingKey { key: k } if k == key), "{error}");
    }
}

#[test]
fn missing_tensors() {
    let required: Vec<String> = Draft::llama().tensors.into_iter().map(|t| t.name).collect();
    for name in required {
        let error = refused(|draft| {
            draft.remove_tensor(&name);
        });
        assert!(matches!(&error, ModelError::MissingTensor { tensor } if *tensor == name));
    }
    // More layers than there are; the count is not believed.
    let error = refused(|draft| {
        draft.key("llama.block_count", Val::U32(u32::MAX));
    });
    assert!(error.to_string().contains("blk.2."), "{error}");
}

#[test]
fn contradictions() {
    let shapes: Vec<(String, Vec<u64>, u32)> =
        Draft::llama().tensors.into_iter().map(|t| (t.name, t.dims, t.type_id)).collect();
    for (name, dims, type_id) in shapes {
        for axis in 0..dims.len() {
            let mut wrong = dims.clone();
            wrong[axis] *= 2;
            let error = refused(|draft| {
                draft.tensor(&name, &wrong, type_id);
            });
            assert!(error.to_string().contains(&name) || name == "token_embd.weight", "{error}");
        }
    }
    for (key, value) in [
        ("llama.embedding_length", 512),
        ("llama.feed_forward_length", 256),
        ("llama.attention.head_count", 8),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count_kv", 4),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.key_length", 32),
        ("llama.attention.key_length", u32::MAX),
        ("llama.attention.value_length", 32),
        ("llama.vocab_size", 9),
        ("llama.rope.dimension_count", 63),
        ("llama.rope.dimension_count", 66),
        ("llama.rope.dimension_count", 0),
    ] {
        refused(|draft| {
            draft.key(key, Val::U32(value));
        });
    }
    let error = refused(|draft| {
        let tokens = (0..9).map(|id| format!("t{id}")).collect();
        draft.key("tokenizer.ggml.tokens", Val::Strs(tokens));
    });
    assert!(error.to_string().contains("9 tokens"), "{error}");
    for key in ["block_count", "context_length", "embedding_length", "attention.head_count"] {
        let error = refused(|draft| {
            draft.key(&format!("llama.{key}"), Val::U32(0));
        });
        assert!(matches!(error, ModelError::BadValue { .. }), "{key}: {error}");
    }
    for eps in [-1.0, f32::NAN, f32::INFINITY] {
        let error = refused(|draft| {
            draft.key("llama.attention.layer_norm_rms_epsilon", Val::F32(eps));
        });
        assert!(matches!(error, ModelError::BadValue { .. }), "{error}");
    }
    for base in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = refused(|draft| {
            draft.key("llama.rope.freq_base", Val::F32(base));
        });
        assert!(matches!(error, ModelError::BadValue { .. }), "{error}");
    }
}

#[test]
fn other_architectures_are_named() {
    let error = refused(|draft| {
        draft.key("general.architecture", Val::Str("mamba"));
    });
    let message = error.to_string();
    assert!(message.contains("mamba"), "{message}");
    assert!(message.ends_with("supported: llama, qwen2, qwen3, gemma3, phi3"), "{message}");
}

#[test]
fn unsupported_types_are_named() {
    let known = (0..64).filter_map(GgmlType::from_id);
    let refused_types: Vec<GgmlType> =
        known.filter(|ty| ty.weight_type().is_none() && ty.transcoded_type().is_none()).collect();
    let names: Vec<_> = refused_types.iter().map(|ty| ty.name()).collect();
    for name in ["IQ1_S", "IQ2_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "F64", "I8"] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    for (type_id, name) in refused_types.iter().map(|ty| (ty.id(), ty.name())) {
        let mut draft = Draft::llama();
        draft.tensor("blk.1.ffn_up.weight", &[256, 512], type_id);
        let mut bytes = draft.bytes();
        // The draft does not know these blocks; there is room enough for any of them.
        bytes.resize(bytes.len() + (4 << 20), 0);
        let at = draft.tensors.iter().position(|t| t.type_id == type_id).unwrap();
        draft.tensors[at].offset = Some(2 << 20);
        let mut bytes = draft.bytes();
        bytes.resize(bytes.len() + (4 << 20), 0);
        let gguf = Gguf::from_vec(bytes).unwrap();
        let message = Model::from_gguf(&gguf).unwrap_err().to_string();
        assert!(message.contains(name) && message.contains("blk.1.ffn_up.weight"), "{message}");
        assert!(message.contains("Q4_K") && message.contains("IQ4_XS"), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
    let error = refused(|draft| {
        draft.tensor("output_norm.weight", &[256], F16);
    });
    assert!(matches!(error, ModelError::UnsupportedType { found: "F16", .. }), "{error}");
}

#[test]
fn extra_tensors_are_reported_or_refused() {
    let mut draft = Draft::llama();
    draft.tensor("blk.0.attn_rot_embd", &[64], F32).tensor("notes", &[3, 3], F32);
    assert_eq!(model(&draft).unwrap().extra_tensors, ["blk.0.attn_rot_embd", "notes"]);
    for name in [
        "blk.0.attn_q.bias",
        "blk.1.ffn_down.bias",
        "output.bias",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_up_exps.weight",
        "blk.0.attn_q_norm.weight",
        "rope_factors_long.weight",
        "blk.0.attn_sub_norm.weight",
    ] {
        let error = refused(|draft| {
            draft.tensor(name, &[256], F32);
        });
        assert!(matches!(&error, ModelError::UnsupportedTensor { tensor } if tensor == name));
    }
    for (key, value) in [
        ("expert_count", Val::U32(8)),
        ("attention.causal", Val::Bool(false)),
        ("attn_logit_softcapping", Val::F32(50.0)),
        ("final_logit_softcapping", Val::F32(30.0)),
    ] {
        let error = refused(|draft| {
            draft.key(&format!("llama.{key}"), value);
        });
        assert!(matches!(error, ModelError::UnsupportedFeature { .. }), "{error}");
    }
}

#[test]
fn rope_scaling() {
    let scaling = |pairs: &[(&str, Val)]| {
        let mut draft = Draft::llama();
        for (key, value) in pairs {
            draft.key(&format!("llama.rope.{key}"), value.clone());
        }
        model(&draft).map(|model| model.config.rope.scaling)
    };
    let kind = |kind| ("scaling.type", Val::Str(kind));
    let factor = |factor| ("scaling.factor", Val::F32(factor));
    assert_eq!(scaling(&[kind("none"), factor(4.0)]).unwrap(), RopeScaling::None);
    assert_eq!(scaling(&[kind("linear")]).unwrap(), RopeScaling::None);
    assert_eq!(scaling(&[factor(0.0)]).unwrap(), RopeScaling::None);
    let linear = RopeScaling::Linear { factor: 4.0 };
    assert_eq!(scaling(&[kind("linear"), factor(4.0)]).unwrap(), linear);
    assert_eq!(scaling(&[factor(4.0)]).unwrap(), linear);
    assert_eq!(scaling(&[("scale_linear", Val::F32(4.0))]).unwrap(), linear);
    let yarn = scaling(&[
        kind("yarn"),
        factor(4.0),
        ("scaling.original_context_length", Val::U32(16)),
        ("scaling.yarn_beta_fast", Val::F32(16.0)),
    ]);
    let expected = RopeScaling::Yarn {
        factor: 4.0,
        original_context_tokens: 16,
        beta_fast: 16.0,
        beta_slow: 1.0,
    };
    assert_eq!(yarn.unwrap(), expected);
    let error = scaling(&[kind("longrope")]).unwrap_err();
    assert!(error.to_string().contains("longrope"), "{error}");
    assert!(scaling(&[factor(f32::NAN)]).is_err());
    assert!(scaling(&[factor(-2.0)]).is_err());
}

/// One of the small models that the reference program made.
fn reference_file(name: &str) -> Gguf {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference-files");
    Gguf::open(std::path::Path::new(folder).join(format!("{name}.gguf"))).unwrap()
}

#[test]
fn qwen2_has_biases_and_qwen3_head_norms() {
    let gguf = reference_file("qwen2-untied");
    let model = Model::from_gguf(&gguf).unwrap();
    assert_eq!(model.config.arch, Architecture::Qwen2);
    assert_eq!(model.config.rope.pairing, RopePairing::Halves);
    let bias = model.layers[1].qkv_bias.unwrap();
    assert_eq!((bias.q.n_elems, bias.k.n_elems, bias.v.n_elems), (64, 32, 32));
    assert_eq!(bias.k.info(&gguf).name(), "blk.1.attn_k.bias");
    assert!(!model.tied_output() && model.layers[0].qk_norm.is_none());
    assert!(Model::from_gguf(&reference_file("qwen2-tied")).unwrap().tied_output());

    let gguf = reference_file("qwen3");
    let model = Model::from_gguf(&gguf).unwrap();
    assert_eq!((model.config.n_embd, model.config.n_head, model.config.head_dim), (64, 4, 32));
    assert_eq!((model.config.q_elems(), model.config.kv_elems()), (128, 64));
    let norm = model.layers[1].qk_norm.unwrap();
    assert_eq!((norm.q.n_elems, norm.k.n_elems), (32, 32));
    assert_eq!(norm.k.info(&gguf).name(), "blk.1.attn_k_norm.weight");
    assert!(model.layers[0].qkv_bias.is_none() && model.extra_tensors.is_empty());
}

#[test]
fn gemma3_has_two_kinds_of_layers() {
    let gguf = reference_file("gemma3");
    let model = Model::from_gguf(&gguf).unwrap();
    let config = &model.config;
    assert_eq!((config.activation, config.embedding_scale), (Activation::GeGlu, 8.0));
    assert_eq!(config.attention_scale, 1.0 / 32f32.sqrt());
    let windows: Vec<u32> = model.layers.iter().map(|layer| layer.window_tokens).collect();
    assert_eq!(windows, [8, 8, 8, 8, 8, 0, 8]);
    let bases: Vec<f64> = (0..7).map(|layer| config.rope_of(layer).base).collect();
    assert_eq!(bases, [1e4, 1e4, 1e4, 1e4, 1e4, 1e6, 1e4]);
    let layer = model.layers[3];
    let name = |vector: Option<lane::model::VectorRef>| vector.unwrap().info(&gguf).name();
    assert_eq!(name(layer.post_attn_norm), "blk.3.post_attention_norm.weight");
    assert_eq!(name(layer.post_ffn_norm), "blk.3.post_ffw_norm.weight");
    assert_eq!(layer.vectors().count(), 6);
    assert!(model.extra_tensors.is_empty());

    let model = Model::from_gguf(&reference_file("gemma3-linear")).unwrap();
    assert_eq!(model.config.rope_of(1).scaling, RopeScaling::Linear { factor: 8.0 });
    assert_eq!(model.config.rope_of(0).scaling, RopeScaling::None);
    assert_eq!(model.config.rope_of(2).base, 1e4);
}

#[test]
fn phi3_has_matrices_that_share_a_tensor() {
    let gguf = reference_file("phi3-longrope");
    let model = Model::from_gguf(&gguf).unwrap();
    let layer = model.layers[1];
    let place = |matrix: TensorRef| {
        let name = matrix.info(&gguf).name().strip_prefix("blk.1.").unwrap().to_owned();
        (name, matrix.first_row, matrix.n_out)
    };
    let qkv = "attn_qkv.weight".to_owned();
    assert_eq!(place(layer.q), (qkv.clone(), 0, 64));
    assert_eq!(place(layer.k), (qkv.clone(), 64, 32));
    assert_eq!(place(layer.v), (qkv, 96, 32));
    let gate_up = "ffn_up.weight".to_owned();
    assert_eq!(place(layer.gate), (gate_up.clone(), 0, 96));
    assert_eq!(place(layer.up), (gate_up, 96, 96));
    // Together they are the tensors, byte by byte.
    assert_eq!(layer.v.first_byte() + layer.v.n_bytes(), layer.v.info(&gguf).n_bytes());
    let all: u64 = gguf.tensors().iter().map(|tensor| tensor.n_bytes()).sum();
    assert_eq!(model.bytes_per_token(), all + model.embed.row_bytes());
    let scanned: u64 =
        [layer.gate, layer.up].map(|m| scan_scales(&gguf, &m).unwrap().n_scales).iter().sum();
    assert_eq!(scanned, 2 * layer.up.info(&gguf).n_elems() / 32);

    assert_eq!(layer.window_tokens, 8);
    assert_eq!(model.config.rope_of(0), &model.config.rope);
    assert_eq!(model.config.rope.attention_factor(), 1.1);
    let factors = |context| model.rope_factors(context).unwrap().info(&gguf).name();
    assert_eq!(factors(64), "rope_factors_short.weight");
    assert_eq!(factors(65), "rope_factors_long.weight");
}

#[test]
fn files_that_may_lack_what_others_need() {
    // The rows of q, k and v in one tensor, in any architecture.
    let mut draft = Draft::llama();
    for own in ["attn_q", "attn_k", "attn_v"] {
        draft.remove_tensor(&format!("blk.1.{own}.weight"));
    }
    draft.tensor("blk.1.attn_qkv.weight", &[256, 512], Q4_K);
    let gguf = Gguf::from_vec(draft.bytes()).unwrap();
    let layer = Model::from_gguf(&gguf).unwrap().layers[1];
    assert_eq!((layer.v.first_row, layer.v.n_out), (384, 128));
    draft.tensor("blk.1.attn_qkv.weight", &[256, 500], Q4_K);
    let error = Model::from_gguf(&Gguf::from_vec(draft.bytes()).unwrap()).unwrap_err();
    assert!(matches!(error, ModelError::WrongShape { .. }), "{error}");

    // A bias, a norm, a set of factors too few.
    let without = |arch: &'static str| {
        let mut draft = Draft::llama();
        for (key, _) in &mut draft.keys {
            *key = key.replace("llama.", &format!("{arch}."));
        }
        draft.key("general.architecture", Val::Str(arch));
        draft
    };
    let missing = |draft: &Draft| Model::from_gguf(&Gguf::from_vec(draft.bytes()).unwrap());
    let error = missing(&without("qwen2")).unwrap_err();
    assert!(error.to_string().contains("blk.0.attn_q.bias"), "{error}");
    let error = missing(&without("gemma3")).unwrap_err();
    assert!(error.to_string().contains("blk.0.attn_q_norm.weight"), "{error}");
    let mut draft = without("phi3");
    draft.tensor("rope_factors_long.weight", &[32], F32);
    let error = missing(&draft).unwrap_err();
    assert!(error.to_string().contains("rope_factors_short.weight"), "{error}");
}

#[test]
fn attention_scales() {
    let mut draft = Draft::llama();
    assert_eq!(model(&draft).unwrap().config.attention_scale, 0.125);
    draft.key("llama.attention.scale", Val::F32(0.25));
    assert_eq!(model(&draft).unwrap().config.attention_scale, 0.25);
    for scale in [-1.0, f32::NAN, f32::INFINITY] {
        let error = refused(|draft| {
            draft.key("llama.attention.scale", Val::F32(scale));
        });
        assert!(matches!(error, ModelError::BadValue { .. }), "{error}");
    }
}

fn synth(shape: Shape, mix: Mix, seed: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut last = 0;
    synth::write(shape, mix, seed, &mut bytes, |written| last = written).unwrap();
    assert_eq!(bytes.len() as u64, synth::file_bytes(shape, mix, seed));
    assert!(last > 0 && last < bytes.len() as u64);
    bytes
}

#[test]
fn synthetic_models_are_whole_models() {
    for mix in Mix::ALL {
        let bytes = synth(Shape::Tiny, mix, 1);
        assert!(bytes.len() < 1_300_000);
        let gguf = Gguf::from_vec(bytes).unwrap();
        let model = Model::from_gguf(&gguf).unwrap();
        assert_eq!(model.config.n_head / model.config.n_kv_head, 4);
        assert!(model.tied_output() && model.extra_tensors.is_empty());
        assert_eq!(model.rope_freqs.unwrap().n_elems, model.config.rope.dims / 2);
        let q6k = model.matrices().filter(|matrix| matrix.ty == WeightType::Q6K).count();
        assert_eq!(q6k, if mix == Mix::Q4KM { 3 } else { 0 });
        assert_eq!(model.matrices().filter(|m| m.ty == WeightType::Q4K).count(), 15 - q6k);
        let tokens = gguf.metadata().strings("tokenizer.ggml.tokens").unwrap().unwrap();
        assert_eq!(tokens.len() as u32, model.config.n_vocab);
        for matrix in model.matrices() {
            let info = matrix.info(&gguf);
            assert_eq!(scan_scales(&gguf, &matrix).unwrap().non_finite, 0);
            let bytes = gguf.tensor_bytes(info).unwrap();
            let mut weights = vec![0.0; info.n_elems() as usize];
            q4k_soa::dequantize(matrix.ty, bytes, &mut weights).unwrap();
            let n = weights.len() as f64;
            let mean = weights.iter().map(|&w| f64::from(w)).sum::<f64>() / n;
            let square = weights.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / n;
            // Scaled so that the output of a matrix is as large as its input.
            let gain = square * f64::from(matrix.n_in);
            assert!((0.93..1.07).contains(&gain), "{}: {gain}", info.name());
            assert!(mean.abs() < 0.05 * square.sqrt(), "{}: mean {mean}", info.name());
        }
    }
}

#[test]
fn synthetic_models_depend_on_the_seed_alone() {
    let one = synth(Shape::Tiny, Mix::Q4KM, 1);
    assert_eq!(one, synth(Shape::Tiny, Mix::Q4KM, 1));
    assert_ne!(one, synth(Shape::Tiny, Mix::Q4KM, 2));
    let threads = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
    assert_eq!(one, threads(1).install(|| synth(Shape::Tiny, Mix::Q4KM, 1)));
    assert_eq!(one, threads(3).install(|| synth(Shape::Tiny, Mix::Q4KM, 1)));
}
