//! A tiny model compiled for the CPU, a server over it, and a client that sees every byte.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use gemma4c_blocks::DType;
use gemma4c_blocks::recipe::Recipe;
use gemma4c_codegen::cpu::{self, Limits};
use gemma4c_models::adapter::is_reserved;
use gemma4c_models::gemma4::{self, Beside, Config};
use gemma4c_models::gguf::Gguf;
use gemma4c_models::synth::{self, Preset};
use gemma4c_models::tokenizer::vocab_from_metadata;
use gemma4c_plan::cuda::KvType;
use gemma4c_plan::{Model, ModelFile, Piece, Plan, Sampling, Seats, Target, Weight};
use gemma4c_runtime::ModelLocation;
use gemma4c_runtime::engine::{CpuDevice, CpuOptions, Device, DraftSource, Drafts, Engine, Options as EngineOptions};
use gemma4c_serve::{Offer, Options, Running, start};
use serde_json::Value;
use tempfile::TempDir;

/// A plan and the folder of its model.
pub struct Tiny {
    pub folder: TempDir,
    pub plan: Plan,
}

/// The model of all tests, made once.
pub static TINY: LazyLock<Tiny> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("model.gguf");
    let preset = Preset::from_name("tiny-dense").expect("a preset");
    let options = synth::Options { layers: Some(2), seed: 4, ..synth::Options::new(preset, DType::Q8_0) };
    synth::write(&options, &path, &|_, _| {}).expect("a model");
    let plan = compile(&path, 512);
    Tiny { folder, plan }
});

pub fn compile(path: &Path, context: u32) -> Plan {
    compile_seated(path, context, None)
}

/// With seats for adapters.
pub fn compile_seated(path: &Path, context: u32, seats: Option<Seats>) -> Plan {
    let file = Gguf::open(path).expect("a model");
    let config = Config::read(&file).expect("a config");
    let graph = gemma4::graph_with(&file, &config, Beside { seats, ..Beside::default() }).expect("a graph");
    let limits = Limits { context, chunk: 16, asked: 16, kv: KvType::F32 };
    let program = cpu::lower(&graph, limits).expect("a program");
    let tensors: Vec<_> = graph.weights.iter().filter_map(|w| file.tensor(&w.name)).collect();
    let weight = |w: &gemma4c_graph::Weight| {
        let (name, dtype, dims) = (w.name.clone(), w.dtype, w.dims.clone());
        let Some(t) = file.tensor(&w.name) else {
            assert!(is_reserved(&w.name), "{} is in the file", w.name);
            let zeros = Piece { rows: dims[1..].iter().product(), recipe: Recipe::Zeros, inputs: vec![] };
            let bytes = w.bytes().expect("a size");
            return Weight { name, dtype, dims, file: 0, offset: 0, bytes, pieces: vec![zeros] };
        };
        Weight { name, dtype, dims, file: t.file as u32, offset: t.offset, bytes: t.len, pieces: vec![] }
    };
    let name = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let files = file.files().iter();
    Plan {
        model: Model {
            architecture: "gemma4".into(),
            name: config.name.clone(),
            files: files.map(|f| ModelFile { path: name(&f.path), bytes: f.len, header_bytes: f.header_len }).collect(),
            fingerprint: file.fingerprint(tensors.iter().copied()),
            layers: config.layers.len() as u32,
            hidden: config.hidden,
            vocab_size: config.vocab_size,
            trained_context: config.context,
            adapters: Vec::new(),
            seats,
        },
        target: Target::Cpu,
        weights: graph.weights.iter().map(weight).collect(),
        program,
        cuda: None,
        others: vec![],
        vocab: vocab_from_metadata(file.metadata()).expect("a vocabulary"),
        sampling: Sampling::default(),
        embedded: None,
        towers: Vec::new(),
        drafter: None,
        report: String::new(),
    }
}

/// A model for a server, with something between its engine and the device, and so many drafts looked up at once.
pub fn offer(
    model: &str,
    plan: Plan,
    folder: &Path,
    sequences: u32,
    steps: Option<u32>,
    wrapped: impl Fn(Box<dyn Device>) -> Box<dyn Device> + Send + Sync + 'static,
) -> Offer {
    let location = ModelLocation { plan: folder.join("plan.bin"), given: None };
    let (opened, suppress) = (plan.clone(), plan.vocab.as_ref().expect("a vocabulary").suppress.clone());
    let open = move || {
        let drafts = match steps {
            None => Drafts::default(),
            steps => Drafts { source: DraftSource::Lookup, steps },
        };
        let cpu = CpuOptions { sequences, snapshots: 4, host_bytes: 0, suppress: suppress.clone() };
        let device: Box<dyn Device> = Box::new(CpuDevice::open(opened.clone(), &location, cpu)?);
        Ok(Engine::new(
            wrapped(device),
            EngineOptions { suppress: suppress.clone(), drafts, ..EngineOptions::default() },
        )?)
    };
    Offer { model: model.into(), aliases: Vec::new(), plan, open: Box::new(open), adapters: Vec::new() }
}

/// A server of its own.
pub struct Server {
    running: Option<Running>,
    pub address: SocketAddr,
}

pub fn options() -> Options {
    Options { port: 0, ..Options::default() }
}

impl Server {
    pub fn new(options: Options, sequences: u32) -> Server {
        Server::on(options, sequences, |device| device)
    }

    /// Whose engine looks so many drafts up in the text so far.
    pub fn drafting(options: Options, sequences: u32, steps: u32) -> Server {
        Server::open(options, sequences, Some(steps), |device| device)
    }

    /// With something between the engine and its device.
    pub fn on(
        options: Options,
        sequences: u32,
        wrapped: impl Fn(Box<dyn Device>) -> Box<dyn Device> + Send + Sync + 'static,
    ) -> Server {
        Server::open(options, sequences, None, wrapped)
    }

    fn open(
        options: Options,
        sequences: u32,
        steps: Option<u32>,
        wrapped: impl Fn(Box<dyn Device>) -> Box<dyn Device> + Send + Sync + 'static,
    ) -> Server {
        Server::of(vec![offer("tiny", TINY.plan.clone(), TINY.folder.path(), sequences, steps, wrapped)], options)
    }

    /// Whose model has another chat template.
    pub fn with_template(template: &str) -> Server {
        let mut plan = TINY.plan.clone();
        plan.vocab.as_mut().expect("a vocabulary").chat_template = Some(template.into());
        Server::of(vec![offer("tiny", plan, TINY.folder.path(), 1, None, |device| device)], options())
    }

    /// Of another model.
    pub fn over(model: &Path, context: u32) -> Server {
        Server::of_context(model, context, options())
    }

    pub fn of_context(model: &Path, context: u32, options: Options) -> Server {
        let folder = model.parent().expect("a folder");
        let plan = compile(model, context);
        Server::of(vec![offer("tiny", plan, folder, 1, None, |device| device)], options)
    }

    /// Of several models, all of them this one with another context.
    pub fn of_models(models: &[(&str, u32)], options: Options, sequences: u32) -> Server {
        let folder = TINY.folder.path();
        let offer = |(name, context): &(&str, u32)| {
            let plan = compile(&folder.join("model.gguf"), *context);
            offer(name, plan, folder, sequences, None, |device| device)
        };
        Server::of(models.iter().map(offer).collect(), options)
    }

    pub fn of(offers: Vec<Offer>, options: Options) -> Server {
        let running = start(offers, options).expect("a server");
        let address = running.address;
        Server { running: Some(running), address }
    }

    pub fn signal(&self) {
        self.running.as_ref().expect("it runs").signal();
    }

    pub fn wait(mut self) {
        self.running.take().expect("it runs").wait().expect("a good end");
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        stream
    }

    /// Sends a request as it stands.
    pub fn send(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).expect("it is read");
        stream.write_all(body).expect("it is read");
        stream
    }

    pub fn request(&self, method: &str, path: &str, body: &[u8]) -> Response {
        Response::read(self.send(method, path, "connection: close\r\n", body))
    }

    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.request("POST", path, body.to_string().as_bytes())
    }

    pub fn get(&self, path: &str) -> Response {
        self.request("GET", path, b"")
    }

    /// The value of a metric without labels but the model's.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text;
        let line = text.lines().find(|line| line.starts_with(&format!("vllm:{name}{{"))).expect("the metric");
        line.rsplit(' ').next().expect("a value").parse().expect("a number")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            running.signal();
            running.signal();
            _ = running.wait();
        }
    }
}

/// An answer, its chunks joined.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub head: String,
    pub text: String,
}

impl Response {
    pub fn read(mut stream: TcpStream) -> Response {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("an answer");
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8(bytes[..end].to_vec()).expect("UTF-8").to_lowercase();
        let mut body = &bytes[end + 4..];
        let mut joined = Vec::new();
        if head.contains("transfer-encoding: chunked") {
            while let Some(line) = body.windows(2).position(|window| window == b"\r\n") {
                let length = std::str::from_utf8(&body[..line]).expect("a length");
                let length = usize::from_str_radix(length, 16).expect("a length");
                joined.extend(&body[line + 2..line + 2 + length]);
                body = &body[line + 2 + length + 2..];
            }
        } else {
            joined.extend(body);
        }
        let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
        Response { status, head, text: String::from_utf8(joined).expect("UTF-8") }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The data of a stream's events, without the last.
    pub fn events(&self) -> Vec<Value> {
        let events = self.text.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':'));
        let data = events.map(|event| event.strip_prefix("data: ").expect("data").to_owned());
        data.filter(|data| data != "[DONE]").map(|data| serde_json::from_str(&data).expect("JSON")).collect()
    }
}
