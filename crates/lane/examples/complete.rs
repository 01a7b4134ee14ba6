//! Continues a text with the embedded model, on the host.
//!
//! `cargo run --release -p lane --example complete -- "Call me Ishmael."`

use std::error::Error;
use std::io::Write;

use lane::tokenizer::Special;
use lane::{BackendChoice, GenerateOptions, LaneOptions, ModelFile, Sampling};

fn main() -> Result<(), Box<dyn Error>> {
    let prompt = std::env::args().nth(1).unwrap_or_else(|| "Call me Ishmael.".into());
    let file = ModelFile::open(None)?;
    let options = LaneOptions { backend: BackendChoice::Host, ..LaneOptions::default() };
    let lane = file.load(&options, &mut |_| {})?;

    let ids = lane.tokenizer().encode_prompt(&prompt, Special::AsText)?;
    let options =
        GenerateOptions { n_tokens: 32, sampling: Sampling::GREEDY, ..GenerateOptions::default() };
    print!("{prompt}");
    let mut generation = lane.generate(&ids, options)?;
    for token in generation.by_ref() {
        print!("{}", token?.text);
        std::io::stdout().flush()?;
    }
    let timing = generation.timing();
    drop(generation);

    println!("\n\n{timing:?}");
    println!("{:#?}", lane.telemetry()?);
    Ok(())
}
