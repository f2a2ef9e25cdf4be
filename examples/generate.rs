//! Continues a text and prints the answer as it comes: `cargo run --release --example generate -- [TEXT] [MODEL.gguf]`.
//! Without a model it is the small one inside the library.

use std::error::Error;
use std::io::{self, Write};
use std::{env, iter};

use gemma4c::{Model, Sampling, demo_model};

fn main() -> Result<(), Box<dyn Error>> {
    run(env::args().skip(1), &mut io::stdout())
}

pub fn run(mut arguments: impl Iterator<Item = String>, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let text = arguments.next().unwrap_or_else(|| "She was".into());
    let gguf = match arguments.next() {
        Some(path) => path.into(),
        None => demo_model(&folder)?,
    };
    let mut model = Model::compile(gguf).context(2048).open()?;
    let answer = model.stream(text.as_str(), &Sampling::default().temperature(0.7).seed(1).max_tokens(40))?;
    for piece in iter::once(Ok(text)).chain(answer) {
        write!(out, "{}", piece?)?;
        out.flush()?;
    }
    Ok(writeln!(out)?)
}
