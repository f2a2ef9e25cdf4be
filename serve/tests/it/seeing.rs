//! A tiny model with towers for pictures and sounds, and files for them.

use std::path::Path;
use std::sync::LazyLock;

use base64::prelude::{BASE64_STANDARD, Engine};
use gemma4c_codegen::cpu::{self, Limits};
use gemma4c_graph::{Graph, WeightId};
use gemma4c_models::gemma4::{self, AudioConfig, AudioKind, Beside, Config, VisionConfig};
use gemma4c_models::gguf::Gguf;
use gemma4c_models::media;
use gemma4c_plan::cuda::KvType;
use gemma4c_plan::{MediaTokens, Medium, ModelFile, Plan, Tower, Weight};
use gemma4c_serve::Options;

use crate::support::{Server, Tiny, compile, offer};

const CONTEXT: u32 = 2048;
/// Soft tokens of a picture.
const PICTURE: u32 = 70;

/// Made once, of the small model that the tests come with. Its template is Google's own.
pub static SEEING: LazyLock<Tiny> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let [text, projector] = ["v_tiny_u.gguf", "v_tiny_u.mmproj.gguf"].map(|name| golden.join("vision").join(name));
    let mut plan = compile(&text, CONTEXT);
    let files = [text, projector].map(|path| Gguf::open(&path).expect("a file"));
    add_towers(&mut plan, &files);
    let template = std::fs::read_to_string(golden.join("google-gemma-4-31B-it.jinja")).expect("a template");
    plan.vocab.as_mut().expect("a vocabulary").chat_template = Some(template);
    Tiny { folder, plan }
});

fn add_towers(plan: &mut Plan, [text, projector]: &[Gguf; 2]) {
    let config = Config::read(text).expect("a config");
    let graph = gemma4::graph_with(text, &config, Beside { pad: Some(0), ..Beside::default() }).expect("a graph");
    let limits = Limits { context: CONTEXT, chunk: 96, asked: 16, kv: KvType::F32 };
    plan.program = cpu::lower(&graph, limits).expect("a program");
    plan.weights.clear();
    add_weights(plan, text, 0, &graph);
    let vision = VisionConfig::read(projector).expect("a config");
    let audio = AudioConfig::read(projector).expect("a config");
    let vocab = plan.vocab.clone().expect("a vocabulary");
    let VisionConfig { patch, pool, .. } = vision;
    let AudioKind::Samples { frame } = audio.kind else { panic!("sounds are frames of samples") };
    for (name, medium, most, tokens, graph) in [
        (
            "vision",
            Medium::Picture { patch, pool },
            PICTURE * pool * pool,
            media::image_tokens(&vocab),
            gemma4::vision_tower(projector, &vision, &[]).expect("a tower").graph,
        ),
        (
            "audio",
            Medium::Samples { frame },
            (media::RATE * media::MOST_SECONDS).div_ceil(frame),
            media::audio_tokens(&vocab),
            gemma4::audio_tower(projector, &audio, &[]).expect("a tower").graph,
        ),
    ] {
        let tokens: MediaTokens = tokens.expect("tokens around media");
        let first = plan.weights.len() as u32;
        let asked = medium.soft(most.into()) as u32;
        let limits = Limits { context: most, chunk: most, asked, kv: KvType::F32 };
        let place = |weight: WeightId| first + weight.0;
        let program = cpu::lower_beside(&graph, limits, &place, &[]).expect("a program");
        add_weights(plan, projector, 1, &graph);
        plan.towers.push(Tower { name: name.into(), program, medium, tokens, stages: Vec::new() });
    }
    let name = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let file = &projector.files()[0];
    plan.model.files.push(ModelFile { path: name(&file.path), bytes: file.len, header_bytes: file.header_len });
    let of_file = |file: u32, gguf: &Gguf| {
        let own = plan.weights.iter().filter(|weight| weight.file == file);
        own.map(|weight| gguf.tensor(&weight.name).expect("a tensor").clone()).collect::<Vec<_>>()
    };
    let tensors = [of_file(0, text), of_file(1, projector)];
    let tensors = tensors.iter().enumerate().flat_map(|(file, own)| own.iter().map(move |tensor| (file, tensor)));
    plan.model.fingerprint = Gguf::fingerprint_of(&[text, projector], tensors);
}

fn add_weights(plan: &mut Plan, gguf: &Gguf, file: u32, graph: &Graph) {
    plan.weights.extend(graph.weights.iter().map(|weight| {
        let tensor = gguf.tensor(&weight.name).expect("a tensor");
        let (name, dims) = (weight.name.clone(), weight.dims.clone());
        Weight { name, dtype: weight.dtype, dims, file, offset: tensor.offset, bytes: tensor.len, pieces: vec![] }
    }));
}

pub fn seeing(more: Options) -> Server {
    let options = Options { image_tokens: Some(PICTURE), port: 0, ..more };
    let offer = offer("tiny", SEEING.plan.clone(), SEEING.folder.path(), 4, None, |device| device);
    Server::of(vec![offer], options)
}

/// A picture of one colour, as a PNG: a palette and one byte a pixel, in a stored block.
pub fn png(colour: [u8; 3]) -> Vec<u8> {
    const SIDE: u8 = 64;
    let chunk = |name: &[u8; 4], data: &[u8]| {
        let body = [name, data].concat();
        let crc = body.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
        });
        [&(data.len() as u32).to_be_bytes(), body.as_slice(), &(!crc).to_be_bytes()].concat()
    };
    let header = [&[0, 0, 0, SIDE][..], &[0, 0, 0, SIDE], &[8, 3, 0, 0, 0]].concat();
    let rows = vec![0u8; usize::from(SIDE) * (usize::from(SIDE) + 1)];
    let adler = ((rows.len() as u32 % 65521) << 16 | 1).to_be_bytes();
    let length = rows.len() as u16;
    let data = [&[0x78, 1, 1][..], &length.to_le_bytes(), &(!length).to_le_bytes(), &rows, &adler].concat();
    let chunks = [chunk(b"IHDR", &header), chunk(b"PLTE", &colour), chunk(b"IDAT", &data), chunk(b"IEND", &[])];
    [b"\x89PNG\r\n\x1a\n".to_vec(), chunks.concat()].concat()
}

/// Samples of 16 bits as a WAV at the model's rate.
pub fn wav(samples: &[i16]) -> Vec<u8> {
    let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let length = data.len() as u32;
    let format = [&16u32.to_le_bytes()[..], &[1, 0, 1, 0], &media::RATE.to_le_bytes()].concat();
    let format = [format, (2 * media::RATE).to_le_bytes().to_vec(), vec![2, 0, 16, 0]].concat();
    [b"RIFF", &(length + 36).to_le_bytes()[..], b"WAVEfmt ", &format, b"data", &length.to_le_bytes(), &data].concat()
}

/// A tone that stops for a third of a second around these times, in tenths of a second.
pub fn tone(tenths: usize, pauses: &[usize]) -> Vec<i16> {
    let rate = media::RATE as usize;
    let is_pause = |at: usize| pauses.iter().any(|pause| at.abs_diff(pause * rate / 10) <= rate / 6);
    let sample = |at: usize| if is_pause(at) { 0 } else { (9000.0 * (at as f32 / 6.0).sin()) as i16 };
    (0..tenths * rate / 10).map(sample).collect()
}

pub fn base64(bytes: &[u8]) -> String {
    BASE64_STANDARD.encode(bytes)
}
