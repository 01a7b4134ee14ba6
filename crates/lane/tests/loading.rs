//! Loading: types that become another, weights that are no numbers, what is held meanwhile.

use std::process::Command;

use lane::batch::{BatchOptions, EngineError, Job};
use lane::residency::ResidencyError;
use lane::{
    BackendChoice, GenerateOptions, Lane, LaneError, LaneOptions, MemoryPlan, ModelFile,
    PlanOptions, Sampling,
};
use q4k_soa::{PackedLayout, Shape, TranscodedType, WeightType};

fn reference_file(name: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference-files").join(name)
}

fn host() -> LaneOptions {
    LaneOptions { backend: BackendChoice::Host, ..Default::default() }
}

fn load(bytes: Vec<u8>) -> Lane {
    ModelFile::from_vec(bytes).unwrap().load(&host(), &mut |_| {}).unwrap()
}

#[test]
fn transcoded_matrices_are_counted_and_planned_as_what_they_become() {
    for ty in TranscodedType::ALL {
        let name = format!("llama-{}.gguf", ty.name().to_lowercase());
        let file = ModelFile::open(Some(&reference_file(&name))).unwrap();
        let cost = file.model.transcoding().unwrap();
        assert_eq!(cost.n_matrices, file.model.matrices().count());
        assert!(cost.types.contains(&ty) && cost.resident_bytes > cost.stored_bytes, "{cost}");

        let device = kernels_ptx::DeviceProfile::A2000;
        let plan = MemoryPlan::new(&file.gguf, &file.model, &device, &PlanOptions::default());
        let plan = plan.unwrap();
        let embed = file.model.embed;
        let shape = Shape { n_out: embed.n_out, n_in: embed.n_in };
        let planned = plan.bytes.allocations().iter().find(|a| &*a.name == "token_embd.weight");
        let packed = PackedLayout::planes(WeightType::Q8_0, shape).unwrap().len_bytes();
        assert_eq!(planned.unwrap().len_bytes, packed);
        file.load(&host(), &mut |_| {}).unwrap();

        let options = LaneOptions { no_transcoding: true, ..host() };
        let refusal = file.load(&options, &mut |_| {}).err().unwrap();
        assert!(matches!(refusal, LaneError::Transcoding(_)), "{refusal}");
        assert!(refusal.to_string().contains(ty.name()), "{refusal}");
    }
}

#[test]
fn the_command_says_what_transcoding_costs_or_refuses() {
    let model = reference_file("llama-q3_k.gguf");
    let lane = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_lane")).args(args).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
    };
    let model = model.to_str().unwrap();
    let cost = "matrices of Q3_K, IQ4_NL become Q8_0";
    let generate = ["generate", "--backend", "host", "-n", "2", "-m", model, "the cat"];
    let (code, _, stderr) = lane(&generate);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(stderr.matches(cost).count(), 1, "{stderr}");
    let (code, stdout, stderr) = lane(&[&generate[..], &["--no-transcode"]].concat());
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(stderr.contains(cost) && stderr.trim_end().lines().count() == 1, "{stderr}");
    let (code, stdout, _) = lane(&["inspect", model]);
    assert_eq!(code, 0);
    assert!(stdout.contains(cost), "{stdout}");
}

#[test]
fn inspect_says_when_the_tokenizer_would_refuse() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("odd.gguf");
    let mut bytes = lane::open::EMBEDDED_MODEL.to_vec();
    // The tokenizer's kind, to one of the same length that nobody knows.
    let kind = b"tokenizer.ggml.model\x08\0\0\0\x04\0\0\0\0\0\0\0gpt2";
    let at = bytes.windows(kind.len()).position(|window| window == kind).unwrap();
    bytes[at + kind.len() - 4..at + kind.len()].copy_from_slice(b"gpt9");
    std::fs::write(&path, bytes).unwrap();
    let inspect = |args: &[&str]| {
        let mut run = Command::new(env!("CARGO_BIN_EXE_lane"));
        String::from_utf8(run.arg("inspect").arg(&path).args(args).output().unwrap().stdout)
            .unwrap()
    };
    let text = inspect(&[]);
    let lines: Vec<_> = text.lines().filter(|line| line.contains("gpt9")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert!(lines[0].starts_with("no text can be generated: "), "{text}");
    assert!(inspect(&["--json"]).contains("gpt9"));
}

/// The embedded model with a norm that is NaN in one place.
fn without_numbers() -> Vec<u8> {
    let mut bytes = lane::open::EMBEDDED_MODEL.to_vec();
    let gguf = lane::gguf::Gguf::from_static(lane::open::EMBEDDED_MODEL).unwrap();
    let at = gguf.tensor("blk.2.ffn_norm.weight").unwrap().offset_bytes() as usize;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    bytes
}

#[test]
fn logits_that_are_no_numbers_are_an_error_that_names_the_step() {
    let lane = load(without_numbers());
    for sampling in [Sampling::GREEDY, Sampling::default()] {
        for reads_logits in [false, true] {
            let mut options = GenerateOptions { n_tokens: 5, sampling, ..Default::default() };
            if reads_logits {
                options.penalties.repeat = 1.1;
            }
            let mut generation = lane.generate(&[1, 2, 3], options).unwrap();
            let error = generation.next().unwrap().map(|_| ()).unwrap_err();
            assert!(matches!(error, LaneError::NotNumbers { n_tokens: 3 }), "{error}");
            assert!(error.to_string().starts_with("the step after 3 tokens failed"), "{error}");
            assert!(generation.next().is_none());
        }
    }
    assert!(matches!(lane.evaluate(&[1, 2]), Err(LaneError::NotNumbers { n_tokens: 1 })));
}

#[test]
fn logits_of_a_batch_that_are_no_numbers_are_an_error() {
    let file = ModelFile::from_vec(without_numbers()).unwrap();
    for sampling in [Sampling::GREEDY, Sampling::default()] {
        let batch = BatchOptions { max_batch: 4, ..Default::default() };
        let mut engine = file.load_batch(&host(), &batch, &mut |_| {}).unwrap().engine;
        for first in 1..=3 {
            let job = Job { prompt: vec![first, 2, 3], n_tokens: 5, salt: 0 };
            engine.submit(job, sampling).unwrap();
        }
        let mut chosen = Vec::new();
        let error = engine.step(&mut chosen).unwrap_err();
        assert!(matches!(error, EngineError::Step(ResidencyError::NotNumbers)), "{error}");
        assert!(chosen.is_empty());
    }
}
