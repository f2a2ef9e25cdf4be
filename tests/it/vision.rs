//! Pictures, from their file to logits: every stage against the reference, any chunks the same bits, and what is
//! refused.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::gguf::{Key, rewrite};
use crate::common::{Place, Tensor, Tensors, golden, ids};
use crate::support;
use gemma4c_models::media::{Pixels, Rgb, cut};
use gemma4c_plan::{Medium, Plan, Stage};
use gemma4c_runtime::cpu::Tap;
use gemma4c_runtime::{Asked, ModelLocation, Patches, Session, Soft, argmax};

/// Largest absolute differences from the picture in the size that the tower reads, as the data's description gives
/// them.
const STAGE: f32 = 1e-4;
const POOLED: f32 = 4e-4;
const PROJECTED: f32 = 5e-5;
const HIDDEN: f32 = 3e-4;
const LOGITS: f32 = 1e-3;

fn off(ours: &[f32], expected: &[f32]) -> (f32, f32) {
    assert_eq!(ours.len(), expected.len());
    let differences = ours.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let square: f64 = differences.clone().map(|d| f64::from(d).powi(2)).sum();
    let worst = differences.fold(0.0, |worst: f32, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) });
    (worst, (square / ours.len() as f64).sqrt() as f32)
}

/// A model of each family, and its pictures.
const FAMILIES: [(&str, &[&str]); 3] = [
    ("v_tiny_e", &["v_tiny_e.png"]),
    ("v_tiny_d", &["v_tiny_d.0.png", "v_tiny_d.1.png"]),
    ("v_tiny_u", &["v_tiny_u.png"]),
];

/// A folder with a plan of the model in it, its files and its pictures.
fn prepared(folder: &Path, name: &str, pictures: &[&str]) -> (Place, Tensors) {
    let place = Place::new();
    let golden = Tensors::read(&folder.join(format!("{name}.golden.safetensors")));
    for ending in ["gguf", "mmproj.gguf"] {
        std::fs::copy(folder.join(format!("{name}.{ending}")), place.path(&format!("model.{ending}"))).unwrap();
    }
    for (index, picture) in pictures.iter().enumerate() {
        std::fs::copy(folder.join(picture), place.path(&format!("{index}.png"))).unwrap();
    }
    place.ok("compile model.gguf --mmproj model.mmproj.gguf --image-tokens 70 --target cpu -o plan.bin");
    (place, golden)
}

#[test]
fn every_stage_is_the_references() {
    for (name, pictures) in FAMILIES {
        if !golden::has(&format!("vision/{name}")) {
            continue;
        }
        let (place, golden) = prepared(&golden::some().join("vision"), name, pictures);
        check_stages(&place, &golden, name);
        check_program(&place, &golden, name, pictures.len());
    }
}

/// A sequence's ids do not tell which pictures stand in it: other ones in the same places are not taken for those of
/// before.
#[test]
fn other_pictures_in_the_same_places_are_read_anew() {
    let Some(folder) = golden::folder() else { return };
    let (place, golden) = prepared(&folder.join("vision"), "v_tiny_e", &["v_tiny_e.png"]);
    let plan = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    let location = ModelLocation { plan: place.path("plan.bin"), given: None };
    let open = || Session::on_cpu(plan.clone(), &location).unwrap();
    let prompt = golden.ids("tokens");
    let placeholders = prompt.iter().filter(|id| **id == plan.towers[0].tokens.placeholder).count();
    let picture = |shade: f32| Soft { tower: 0, rows: vec![shade; placeholders * plan.model.hidden as usize] };
    let read = |session: &mut Session, soft: &Soft| {
        session.set_soft(&prompt, std::slice::from_ref(soft)).unwrap();
        let kept = session.keep_prefix(&prompt);
        let mut logits = Vec::new();
        session.feed(&prompt[kept..], Asked::Last, None, |_, row| logits = row.to_vec()).unwrap();
        (logits, kept)
    };
    let mut session = open();
    let first = read(&mut session, &picture(0.5));
    let second = read(&mut session, &picture(-0.5));
    assert!(second.1 < prompt.len() - placeholders, "{}", second.1);
    assert!(second.0 == read(&mut open(), &picture(-0.5)).0 && second.0 != first.0);
    assert_eq!(read(&mut session, &picture(-0.5)), (second.0, prompt.len() - 1), "the same picture is kept");
}

/// From the pictures in the size that the tower reads, as the reference resampled them.
fn check_stages(place: &Place, golden: &Tensors, name: &str) {
    let plan = Plan::from_bytes(&place.read("plan.bin")).unwrap();
    let location = ModelLocation { plan: place.path("plan.bin"), given: None };
    let mut session = Session::on_cpu(plan.clone(), &location).unwrap();
    let tower = &plan.towers[0];
    let Medium::Picture { patch, .. } = tower.medium else { panic!("the first tower reads pictures") };
    let (mut media, mut compared) = (Vec::new(), 0);
    for (index, resized) in (0..).map_while(|i| Some((i, golden.find(&format!("image.{i}.resized"))?))) {
        let size = Pixels { width: resized.shape[1] as u32, height: resized.shape[0] as u32 };
        let bytes = resized.values.iter().map(|value| *value as u8).collect();
        let patches = cut(&Rgb { size, bytes }, patch);
        let input = Patches { values: &patches.values, columns: patches.columns, rows: patches.rows };
        let mut faults = Vec::new();
        let soft = session.look(0, input, &mut |value, _, rows| {
            let is_value = |stage: &&Stage| tower.program.values[stage.value as usize].name == value;
            for stage in tower.stages.iter().filter(is_value) {
                let limit = match stage.name.as_str() {
                    "pooled" | "standardized" => POOLED,
                    "projected" => PROJECTED,
                    _ => STAGE,
                };
                let (worst, _) = off(rows, &golden.get(&format!("vision.{index}.{}", stage.name)).values);
                compared += 1;
                if worst > limit {
                    faults.push(format!("vision.{index}.{} is off by {worst:e}, the limit is {limit:e}", stage.name));
                }
            }
        });
        media.push(soft.unwrap());
        assert!(faults.is_empty(), "{name}: {faults:#?}");
    }
    assert_eq!(compared, golden.names().filter(|key| key.starts_with("vision.")).count(), "{name}: stages");

    let (prompt, greedy) = (golden.ids("tokens"), golden.ids("greedy.tokens"));
    session.set_soft(&prompt, &media).unwrap();
    let mut values: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    let mut logits: Vec<f32> = Vec::new();
    let tap: &mut Tap<'_> = &mut |name, _, rows| values.entry(name.to_owned()).or_default().extend_from_slice(rows);
    session.feed_tapped(&prompt, Asked::All, None, tap, &mut |_, row| logits.extend_from_slice(row)).unwrap();
    let mut stages = vec![("embed".to_owned(), "embedding.out".to_owned(), PROJECTED)];
    stages.extend(
        golden.find("per_layer_inputs").map(|_| ("per_layer_inputs".into(), "per_layer_inputs.out".into(), STAGE)),
    );
    let layers = (0..).take_while(|layer| golden.find(&format!("hidden.{layer}")).is_some());
    stages.extend(layers.map(|layer| (format!("hidden.{layer}"), format!("blk.{layer}.layer.out"), HIDDEN)));
    for (key, value, limit) in stages {
        let (worst, _) = off(&values[&value], &golden.get(&key).values);
        assert!(worst <= limit, "{name}: {key} is off by {worst:e}");
    }
    let (worst, _) = off(&logits, &golden.get("logits").values);
    assert!(worst <= LOGITS, "{name}: logits are off by {worst:e}");
    let mut continued = logits[logits.len() - plan.model.vocab_size as usize..].to_vec();
    for token in &greedy[..greedy.len() - 1] {
        session.decode(*token, |row| continued.extend_from_slice(row)).unwrap();
    }
    let (worst, _) = off(&continued, &golden.get("greedy.logits").values);
    assert!(worst <= LOGITS, "{name}: logits of the continuation are off by {worst:e}");
}

/// From the files as they came, through our own resampling and the command line.
fn check_program(place: &Place, golden: &Tensors, name: &str, pictures: usize) {
    let images: String = (0..pictures).map(|index| format!(" --image {index}.png")).collect();
    let taps: Vec<String> = (0..pictures).map(|index| format!("vision.{index}.projected")).collect();
    let tapped: String = taps.iter().map(|tap| format!(" --tap {tap}")).collect();
    let (prompt, greedy) = (ids(&golden.ids("tokens")), golden.ids("greedy.tokens"));
    let ours = place.logits("plan.bin", &format!("--tokens {prompt}{images}{tapped}"));
    for tap in &taps {
        let (worst, rms) = off(&ours.get(tap).values, &golden.get(tap).values);
        assert!(worst <= 1e-2 && rms <= 2e-3 && worst > PROJECTED, "{name}: {tap} {worst:e}, {rms:e}");
    }
    let chosen = place.ok(&format!("run plan.bin --tokens {prompt} --temp 0 -n {}{images}", greedy.len()));
    assert_eq!(chosen.trim_end(), greedy.iter().map(u32::to_string).collect::<Vec<_>>().join(" "), "{name}");
    // Pixels are told in the reference's order, and all but a few as the reference resamples them.
    if golden.find("image.0.pixel_values").is_some() {
        let tap = "image.0.pixel_values";
        let ours = place.logits("plan.bin", &format!("--tokens {prompt}{images} --tap {tap}"));
        let pairs = ours.get(tap).values.iter().zip(&golden.get(tap).values);
        let (all, differ) = (pairs.len(), pairs.filter(|(a, b)| (*a - *b).abs() > 1e-7).count());
        assert!(differ * 100 <= all, "{name}: {differ} of {all} values differ");
        assert!(off(&ours.get(tap).values, &golden.get(tap).values).0 < 1.01 / 255.0);
    }
}

/// Of bf16 towers, as the data's description gives them: the largest difference of a soft token, and their rms.
const SOFT_BF16: (f32, f32) = (0.08, 0.02);
/// Of logits of a text with 8-bit activations.
const LOGITS_INT8: (f32, f32) = (1.0, 0.25);

/// The launches of a tower and its text, in the simulator: soft tokens, the logits after a prompt with a picture and
/// their largest, and other chunks. Of one kind, since the simulator takes long.
#[test]
fn a_simulated_gpu_reads_pictures() {
    let Some(folder) = golden::folder() else { return };
    if support::toolchain().is_none() {
        return;
    }
    let (place, golden) = prepared(&folder.join("vision"), FAMILIES[0].0, FAMILIES[0].1);
    // Its projector has a tower for sound too, which has no kernels and stays out.
    place.ok("compile model.gguf --mmproj model.mmproj.gguf --image-tokens 70 --gpu h200 --ctx 512 -o plan.bin");
    let plan = place.ok("inspect plan.bin");
    assert!(plan.contains("tower 70"), "{plan}");
    let line = format!("--device sim --tokens {} --image 0.png", ids(&golden.ids("tokens")));
    let tap = "vision.0.projected";
    let ours = place.logits("plan.bin", &format!("{line} --tap {tap}"));
    let (worst, rms) = off(&ours.get(tap).values, &golden.get(tap).values);
    assert!(worst <= SOFT_BF16.0 && rms <= SOFT_BF16.1, "{tap} {worst:e}, {rms:e}");
    let (ours, all) = (ours.get("logits"), &golden.get("logits").values);
    let expected = &all[all.len() - ours.values.len()..];
    let (worst, rms) = off(&ours.values, expected);
    assert!(worst <= LOGITS_INT8.0 && rms <= LOGITS_INT8.1, "logits {worst:e}, {rms:e}");
    assert_eq!(argmax(&ours.values), argmax(expected));
    // Without taps a tower is one run; with other chunks the text has the same bits.
    assert!(place.logits("plan.bin", &format!("{line} --chunk 33")).get("logits") == ours);
}

/// However a prompt is cut, also in the middle of a picture.
#[test]
fn chunks_do_not_matter() {
    let Some(folder) = golden::folder() else { return };
    let (place, golden) = prepared(&folder.join("vision"), FAMILIES[0].0, FAMILIES[0].1);
    let prompt = ids(&golden.ids("tokens"));
    let with = |chunk: &str| {
        let logits = place.logits("plan.bin", &format!("--tokens {prompt} --all --image 0.png {chunk}"));
        logits.get("logits").clone()
    };
    let whole: Tensor = with("");
    for chunk in [7, 16, 64, 2048] {
        assert!(with(&format!("--chunk {chunk}")) == whole, "chunks of {chunk}");
    }
    // Rows that see each other are never cut apart, whatever is asked for.
    let (other, golden) = prepared(&folder.join("vision"), FAMILIES[1].0, FAMILIES[1].1);
    let prompt = format!("--tokens {} --all --image 0.png --image 1.png", ids(&golden.ids("tokens")));
    let whole_pictures = other.logits("plan.bin", &prompt);
    assert!(other.logits("plan.bin", &format!("{prompt} --chunk 7")) == whole_pictures);

    // The plan with its weights in it needs no other file.
    place.ok(
        "compile model.gguf --mmproj model.mmproj.gguf --image-tokens 140 --target cpu --embed-weights -o plan.bin",
    );
    for name in ["model.gguf", "model.mmproj.gguf"] {
        std::fs::remove_file(place.path(name)).unwrap();
    }
    assert!(with("--image-tokens 70") == whole);
}

#[test]
fn a_picture_stands_before_its_question() {
    let Some(folder) = golden::folder() else { return };
    let (place, _) = prepared(&folder.join("vision"), FAMILIES[0].0, FAMILIES[0].1);
    // Tokens of the prompt, as the program counts them, and what it says.
    let told = |line: &str| {
        let ran = place.run(&format!("run plan.bin --temp 0 -n 8 {line}"));
        assert_eq!(ran.code, Some(0), "{line}\n{}", ran.stderr);
        let prompt = ran.stderr.split("[prefill: ").nth(1).and_then(|rest| rest.split(' ').next());
        (prompt.expect("a count").parse::<usize>().expect("a number"), ran.stdout)
    };
    let picture = 62;
    for text in ["-p hello", "--chat -p hello", "--chat --system 'be brief' -p hello"] {
        let [none, one, two] =
            ["", " --image 0.png", " --image 0.png --image 0.png"].map(|images| told(&format!("{text}{images}")));
        assert_eq!((one.0, two.0), (none.0 + picture, none.0 + 2 * picture), "{text}");
        assert!(one.1 != none.1 || two.1 != none.1, "{text}: {}", one.1);
    }
    // Prompts of a file have no pictures, and no token of theirs passes for one.
    place.write("prompts.jsonl", "{\"tokens\": [2, 20, 17, 21]}\n");
    let refusal = place.refused("run plan.bin --file prompts.jsonl -o answers.jsonl");
    assert!(refusal.contains("token 17 holds the place of a picture or a sound"), "{refusal}");
    place.ok("inspect plan.bin --html page.html");
    let page = String::from_utf8(place.read("page.html")).unwrap();
    assert!(page.contains("activations of towers") && page.contains("70 soft tokens of a picture at most"));
    let plan = place.ok("inspect plan.bin");
    assert!(plan.contains("tower vision"), "{plan}");
    assert!(place.ok("inspect plan.bin --graph").contains("= full_attention("));
}

/// What a PNG of 100,000 by 100,000 pixels starts with.
fn huge_png() -> Vec<u8> {
    let header = [&b"IHDR"[..], &100_000u32.to_be_bytes(), &100_000u32.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let bit = |crc: u32, _: u32| (crc >> 1) ^ (0xedb8_8320 * (crc & 1));
    let crc = !header.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), bit));
    [&b"\x89PNG\r\n\x1a\n\0\0\0\x0d"[..], &header, &crc.to_be_bytes(), b"\0\0\0\0IDAT\x35\xaf\x06\x1e"].concat()
}

#[test]
fn each_refusal_has_its_words() {
    let Some(folder) = golden::folder() else { return };
    let (place, golden) = prepared(&folder.join("vision"), FAMILIES[0].0, FAMILIES[0].1);
    let prompt = ids(&golden.ids("tokens"));
    place.write("drawing.svg", "<svg xmlns=\"http://www.w3.org/2000/svg\"></svg>");
    place.write("cut.png", &place.read("0.png")[..1000]);
    place.write("huge.png", huge_png());
    let other_size = |key: &str| if key == "clip.vision.projection_dim" { Key::Set(512u32.into()) } else { Key::Keep };
    let keep = |tensor: &gemma4c_models::gguf::TensorInfo| Some(tensor.dims().to_vec());
    rewrite(&place.path("model.mmproj.gguf"), &place.path("other.mmproj.gguf"), other_size, keep);
    rewrite(
        &place.path("model.mmproj.gguf"),
        &place.path("less.mmproj.gguf"),
        |_| Key::Keep,
        |tensor| (!tensor.name.starts_with("v.blk.1.attn_k")).then(|| tensor.dims().to_vec()),
    );
    place.ok("compile model.gguf --target cpu -o text.bin");
    let logits = format!("logits plan.bin --tokens {prompt} -o out.safetensors");
    let mut texts = String::new();
    for (name, line) in [
        ("no picture", logits.clone()),
        ("a picture too many", format!("{logits} --image 0.png --image 0.png")),
        ("a picture without places", "logits plan.bin --tokens 2,30,31 -o out.safetensors --image 0.png".into()),
        ("a budget beyond the plan's", format!("{logits} --image 0.png --image-tokens 140")),
        ("a budget that is none", format!("{logits} --image 0.png --image-tokens 100")),
        ("a drawing", format!("{logits} --image drawing.svg")),
        ("a cut picture", format!("{logits} --image cut.png")),
        ("a huge picture", format!("{logits} --image huge.png")),
        ("a folder", format!("{logits} --image .")),
        ("a file that is not there", format!("{logits} --image nothing.png")),
        ("a tap of a picture that is not there", format!("{logits} --image 0.png --tap vision.1.pooled")),
        ("a tap that is not there", format!("{logits} --image 0.png --tap vision.0.nothing")),
        ("a plan that reads text alone", "run text.bin -p hello --image 0.png".into()),
        ("a projector of another size", "compile model.gguf --mmproj other.mmproj.gguf --target cpu -o p.bin".into()),
        ("a projector that lacks tensors", "compile model.gguf --mmproj less.mmproj.gguf --target cpu -o p.bin".into()),
        ("a text model as projector", "compile model.gguf --mmproj model.gguf --target cpu -o p.bin".into()),
    ] {
        texts += &format!("{name}\n    {}", place.refused(&line).replace('\n', "\n    ").trim_end_matches(' '));
    }
    assert_text!("errors", "vision", texts);
}
