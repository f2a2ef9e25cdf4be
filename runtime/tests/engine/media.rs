//! Pictures and sounds in prompts: towers run once, when their place is reached; no picture is cut; a prefix is found
//! by what was attached, not by its placeholders.

use std::sync::Arc;
use std::time::Duration;

use gemma4c_plan::Medium;
use gemma4c_runtime::engine::{Attachment, Engine, Gap, Request, RequestError};
use gemma4c_runtime::{Patches, TowerLimits};

use crate::fake::{Alone, Fake, ROW_TIME};
use crate::{Random, all_events, cached, engine_on, limits, storm_on};

const PICTURE: u32 = 48;
const SOUND: u32 = 49;

/// Pictures of 3 patches a soft token's side that see each other, and sounds.
fn towers() -> Vec<TowerLimits> {
    let picture = Medium::Picture { patch: 1, pool: 3 };
    let tower =
        |medium, placeholder, is_whole| TowerLimits { medium, placeholder, patches: 144, soft: 16, side: 60, is_whole };
    vec![tower(picture, PICTURE, true), tower(Medium::Samples { frame: 2 }, SOUND, false)]
}

fn fake() -> Fake {
    let mut fake = Fake::new(limits());
    fake.times.chunk = |rows| (8 + rows as u64) * ROW_TIME;
    fake.towers = towers();
    fake
}

fn picture(content: u32, columns: u32, rows: u32, position: u32) -> Attachment {
    let values: Vec<f32> = (0..27 * columns * rows).map(|i| (content * 1000 + i) as f32).collect();
    Attachment::new(0, position, Patches { values: &values, columns: 3 * columns, rows: 3 * rows })
}

fn sound(content: u32, frames: u32, position: u32) -> Attachment {
    let values: Vec<f32> = (0..2 * frames).map(|i| (content * 1000 + i) as f32).collect();
    Attachment::new(1, position, Patches { values: &values, columns: frames, rows: 1 })
}

/// Puts media over tokens of a prompt, and takes away what does not go with them.
fn attach(request: Request, media: &[(Attachment, u32)]) -> Request {
    let mut prompt = request.prompt.to_vec();
    let mut snapshot_at = request.snapshot_at.clone();
    for (attachment, soft) in media {
        let positions = attachment.position..attachment.position + soft;
        prompt[positions.start as usize..positions.end as usize].fill(if attachment.tower == 0 {
            PICTURE
        } else {
            SOUND
        });
        snapshot_at.retain(|at| *at <= positions.start || *at >= positions.end);
    }
    let media = media.iter().map(|(attachment, _)| attachment.clone()).collect();
    Request { prompt: prompt.into(), snapshot_at, media, prompt_logits: false, ..request }
}

#[test]
fn media_change_nothing_for_their_neighbours_and_are_never_cut() {
    let attach_some = |random: &mut Random, request: Request| {
        let room = request.prompt.len();
        let mut media = vec![];
        if room > 22 && !random.one_in(3) {
            media.push((picture(random.below(2) as u32, 4, 3, 10), 12));
        }
        if room > 35 && random.one_in(2) {
            media.push((sound(random.below(2) as u32, 6, 29), 6));
        }
        if room > 60 && random.one_in(3) {
            media.push((picture(3, 8, 2, 40), 16));
        }
        attach(request, &media)
    };
    for (seed, gap) in
        [(1, Gap::Within(Duration::from_millis(8))), (2, Gap::Any), (3, Gap::Within(Duration::from_micros(1)))]
    {
        let (cached, engine) = storm_on(engine_on(fake(), gap), seed, 600, [90, 64, 33, 20, 5], attach_some);
        let counts = engine.device().counts;
        assert!(cached > 500 && counts.looked > 200 && counts.shared > 20, "{cached} {counts:?}");
    }
}

fn run(engine: &mut Engine<Fake>, request: Request) -> (u32, Vec<u32>) {
    let id = engine.submit(request.clone()).unwrap();
    let events = all_events(engine);
    let tokens = events.iter().filter_map(|event| match event {
        gemma4c_runtime::engine::Event::Token { token, .. } => Some(*token),
        _ => None,
    });
    let tokens: Vec<u32> = tokens.collect();
    assert_eq!(tokens, Alone::of(&request).answer(&request, None, engine.limits()).0);
    (cached(&events, id), tokens)
}

#[test]
fn a_prefix_is_kept_by_its_picture() {
    let mut engine = engine_on(fake(), Gap::Any);
    let plain = Request { snapshot_at: vec![40], ..Request::greedy(Random(3).tokens(60), 8) };
    let with = |content: u32| attach(plain.clone(), &[(picture(content, 4, 3, 10), 12)]);
    let (first, answer) = run(&mut engine, with(1));
    assert_eq!((first, engine.device().counts.looked), (0, 1));
    let (again, same) = run(&mut engine, with(1));
    assert_eq!(
        (again, engine.device().counts.looked, &same),
        (40, 1, &answer),
        "the tower does not run for a kept prefix"
    );
    let (other, another) = run(&mut engine, with(2));
    assert_eq!((other, engine.device().counts.looked), (0, 2), "the same tokens, another picture");
    assert_ne!(another, answer);
    // The placeholders as tokens of a text, and a picture of another shape in the same places.
    let bare = Request { media: Arc::default(), ..with(1) };
    assert_eq!(run(&mut engine, bare).0, 0);
    assert_eq!(run(&mut engine, attach(plain.clone(), &[(picture(1, 3, 4, 10), 12)])).0, 0);
    // What comes before a picture is shared by all.
    let before = |content: u32| Request { snapshot_at: vec![9], ..with(content) };
    run(&mut engine, before(5));
    assert_eq!(run(&mut engine, before(6)).0, 9);
}

#[test]
fn what_cannot_be_read_is_refused_alone() {
    let engine = engine_on(fake(), Gap::Any);
    let plain = Request::greedy(Random(3).tokens(60), 8);
    let refused = |request: &Request| engine.check(request).unwrap_err().to_string();
    let good = attach(plain.clone(), &[(picture(1, 4, 3, 10), 12)]);
    engine.check(&good).unwrap();
    let moved = Request { media: Arc::from([picture(1, 4, 3, 11)]), ..good.clone() };
    assert_eq!(
        refused(&moved),
        "medium 0 has 12 soft tokens, and the prompt does not hold as many places for them (token 48) from position 11 on"
    );
    let twice = Request { media: Arc::from([picture(1, 4, 3, 10), picture(1, 4, 3, 10)]), ..good.clone() };
    assert!(refused(&twice).starts_with("medium 1 "));
    let beyond = Request { media: Arc::from([picture(1, 4, 3, 55)]), ..good.clone() };
    assert!(refused(&beyond).starts_with("medium 0 "));
    let cut = Request { snapshot_at: vec![15], ..good.clone() };
    assert_eq!(refused(&cut), "a snapshot was asked for at position 15, within a picture or a sound");
    let read = Request { prompt_logits: true, ..good.clone() };
    assert!(matches!(engine.check(&read), Err(RequestError::LogitsOfMedia)));
    let large = attach(plain.clone(), &[(picture(1, 10, 3, 10), 30)]);
    assert!(refused(&large).contains("30 soft tokens: the plan has room for 16"));
    let unknown =
        Request { media: Arc::from([Attachment::new(2, 10, picture(1, 4, 3, 10).patches())]), ..good.clone() };
    assert!(refused(&unknown).contains("compile it with --mmproj"));
    let text_only = engine_on(Fake::new(limits()), Gap::Any);
    assert!(text_only.check(&good).unwrap_err().to_string().contains("compile it with --mmproj"));
}
