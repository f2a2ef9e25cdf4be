//! Pictures and sounds through the engine: every token and every bit of its logits is what a session has, alone, beside
//! other requests, and from a kept prefix.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use gemma4c_models::media::{Cut, decode, decode_sound, frames};
use gemma4c_plan::{Medium, Plan};
use gemma4c_runtime::engine::{
    Attachment, BackendDevice, BackendOptions, CpuDevice, CpuOptions, Device, Engine, Event, Options, Request,
};
use gemma4c_runtime::{Asked, ModelLocation, Patches, Session, argmax};

use crate::common::{Place, Tensors, golden, random_tokens};
use crate::support;

/// Tokens and the bits of the logits each was picked from.
type Answer = Vec<(u32, Vec<u32>)>;

const TOKENS: u32 = 4;

fn prepared(folder: &Path, name: &str, compile: &str) -> (Place, Plan, ModelLocation) {
    let place = Place::new();
    for ending in ["gguf", "mmproj.gguf"] {
        std::fs::copy(folder.join(format!("{name}.{ending}")), place.path(&format!("model.{ending}"))).unwrap();
    }
    place.ok(&format!("compile model.gguf --mmproj model.mmproj.gguf --image-tokens 70 {compile} -o plan.bin"));
    let plan = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    let location = ModelLocation { plan: place.path("plan.bin"), given: None };
    (place, plan, location)
}

/// A file as the first tower that reads such media wants it.
fn attachment(plan: &Plan, file: &Path) -> Attachment {
    let bytes = std::fs::read(file).unwrap();
    let is_picture = file.extension().unwrap() == "png";
    let tower = plan.towers.iter().position(|tower| tower.medium.is_picture() == is_picture).unwrap();
    match plan.towers[tower].medium {
        Medium::Picture { patch, pool } => {
            let patches = Cut { patch, pool, budget: 70 }.patches(&decode(&bytes).unwrap()).unwrap();
            let (columns, rows) = (patches.columns, patches.rows);
            Attachment::new(tower, 0, Patches { values: &patches.values, columns, rows })
        }
        medium => {
            let frames = frames(medium, &decode_sound(&bytes).unwrap()).unwrap();
            Attachment::new(tower, 0, Patches { values: &frames.values, columns: frames.count, rows: 1 })
        }
    }
}

/// Another medium with the same tokens.
fn changed(attachment: &Attachment) -> Attachment {
    let Patches { values, columns, rows } = attachment.patches();
    let values: Vec<f32> = values.iter().rev().copied().collect();
    Attachment::new(attachment.tower, attachment.position, Patches { values: &values, columns, rows })
}

/// The reference's prompt with media at the places that it holds for them.
fn request(plan: &Plan, prompt: &[u32], media: &[Attachment]) -> Request {
    let mut at = 0;
    let media: Vec<Attachment> = media
        .iter()
        .map(|attachment| {
            let token = plan.towers[attachment.tower].tokens.placeholder;
            let first = (at..prompt.len()).find(|position| prompt[*position] == token).unwrap();
            at = (first..).find(|position| prompt[*position] != token).unwrap();
            attachment.clone().at(first as u32)
        })
        .collect();
    // Behind the last of them, and not at the prompt's end.
    let snapshot_at = vec![at as u32];
    Request { media: media.into(), snapshot_at, logits: true, ..Request::greedy(prompt, TOKENS) }
}

fn by_session(session: &mut Session, request: &Request) -> Answer {
    session.reset();
    let look = |attachment: &Attachment| session.soft_tokens(attachment.tower, attachment.patches()).unwrap();
    let soft: Vec<_> = request.media.iter().map(look).collect();
    // Placeholders without media are tokens like others.
    session.set_soft(if soft.is_empty() { &[] } else { &request.prompt }, &soft).unwrap();
    let mut row = vec![];
    session.feed(&request.prompt, Asked::Last, None, |_, logits| row = logits.to_vec()).unwrap();
    let mut answer = vec![];
    loop {
        let token = argmax(&row).unwrap();
        answer.push((token, row.iter().map(|value| value.to_bits()).collect()));
        if answer.len() == request.most as usize {
            return answer;
        }
        session.decode(token, |logits| row = logits.to_vec()).unwrap();
    }
}

/// Answers, and how many tokens of each prompt were kept.
fn by_engine<D: Device>(engine: &mut Engine<D>, requests: &[&Request]) -> Vec<(Answer, u32)> {
    let ids: Vec<_> = requests.iter().map(|request| engine.submit((*request).clone()).unwrap()).collect();
    let mut answers: BTreeMap<_, (Answer, u32)> = BTreeMap::new();
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            let (answer, kept) = answers.entry(event.id()).or_default();
            match event {
                Event::Token { token, logits, .. } => {
                    answer.push((token, logits.iter().map(|value| value.to_bits()).collect()));
                }
                Event::Admitted { cached, .. } => *kept = cached,
                Event::Finished { .. } | Event::Prompt { .. } | Event::Drafted { .. } => {}
                Event::Failed { error, .. } => panic!("{error}"),
            }
        }
        engine.audit().unwrap();
    }
    ids.iter().map(|id| answers.remove(id).unwrap()).collect()
}

fn check<D: Device>(name: &str, engine: &mut Engine<D>, mut alone: impl FnMut(&Request) -> Answer, given: &Request) {
    let mut others: Vec<Attachment> = given.media.to_vec();
    others[0] = changed(&others[0]);
    let other = Request { media: others.into(), ..given.clone() };
    let text = Request { logits: true, ..Request::greedy(random_tokens(5, 19, 500), 2 * TOKENS) };
    let bare = Request { media: Arc::default(), ..given.clone() };
    let expected = [given, &other, &text, &bare].map(&mut alone);
    assert_ne!(expected[0], expected[1], "{name}: pictures matter");
    // Beside others, one of which has another picture at the same tokens.
    let together = by_engine(engine, &[&text, given, &other, &bare, &text]);
    for (at, of) in [(0, 2), (1, 0), (2, 1), (3, 3), (4, 2)] {
        assert!(together[at].0 == expected[of], "{name}: request {at}");
    }
    assert_eq!(together.iter().map(|(_, kept)| kept).sum::<u32>(), 0, "{name}: nothing was there to be kept");
    let again = by_engine(engine, &[given, &text]);
    assert!(again[0].0 == expected[0] && again[1].0 == expected[2], "{name}: from a kept prefix");
    assert_eq!(again[0].1, given.snapshot_at[0], "{name}");
}

#[test]
fn the_engine_answers_media_as_a_session_does() {
    let Some(folder) = golden::folder() else { return };
    let folder = folder.join("vision");
    let media: [(&str, &str, &[&str]); 5] = [
        ("v_tiny_e", "v_tiny_e", &["v_tiny_e.png"]),
        ("v_tiny_d", "v_tiny_d", &["v_tiny_d.0.png", "v_tiny_d.1.png"]),
        ("v_tiny_u", "v_tiny_u", &["v_tiny_u.png"]),
        ("v_tiny_e", "a_tiny_e", &["a_tiny_e.wav"]),
        ("v_tiny_u", "a_tiny_u", &["a_tiny_u.wav"]),
    ];
    for (model, golden, files) in media {
        let (_place, plan, location) = prepared(&folder, model, "--target cpu --ctx 512 --chunk 70");
        let prompt = Tensors::read(&folder.join(format!("{golden}.golden.safetensors"))).ids("tokens");
        let attachments: Vec<Attachment> = files.iter().map(|file| attachment(&plan, &folder.join(file))).collect();
        let given = request(&plan, &prompt, &attachments);
        let mut session = Session::on_cpu(plan.clone(), &location).unwrap();
        let options = CpuOptions { sequences: 6, snapshots: 6, ..CpuOptions::default() };
        let device = CpuDevice::open(plan, &location, options).unwrap();
        let mut engine = Engine::new(device, Options::default()).unwrap();
        check(golden, &mut engine, |request| by_session(&mut session, request), &given);
    }
}

/// One model, since the simulator takes long: that whose pictures must not be cut.
#[test]
fn a_simulated_gpu_answers_pictures_beside_text() {
    let Some(folder) = golden::folder() else { return };
    if support::toolchain().is_none() {
        return;
    }
    let folder = folder.join("vision");
    let (_place, plan, location) = prepared(&folder, "v_tiny_u", "--gpu h200 --ctx 512 --sequences 2");
    let attachment = attachment(&plan, &folder.join("v_tiny_u.png"));
    let token = plan.towers[0].tokens.placeholder;
    let golden = Tensors::read(&folder.join("v_tiny_u.golden.safetensors")).ids("tokens");
    let first = golden.iter().position(|id| *id == token).unwrap();
    let end = golden.iter().rposition(|id| *id == token).unwrap() + 2;
    let mut given = request(&plan, &golden[first - 1..end], &[attachment]);
    given.most = 2;
    let text = Request { logits: true, ..Request::greedy(random_tokens(5, 3, 500), 2) };
    let open = || gemma4c::simulate::open_backend(plan.clone(), &location, None).unwrap();
    let (opened, backend) = open();
    let mut session = Session::with_backend(Plan::clone(&opened), backend).unwrap();
    let expected = [by_session(&mut session, &given), by_session(&mut session, &text)];
    let (opened, backend) = open();
    let device = BackendDevice::new(&opened, backend, BackendOptions::default()).unwrap();
    let mut engine = Engine::new(device, Options::default()).unwrap();
    let together = by_engine(&mut engine, &[&given, &text]);
    assert!(together[0].0 == expected[0] && together[1].0 == expected[1]);
}
