//! Sound, from its file to logits: every stage against the reference, other rates and formats, pictures beside it, and
//! what is refused.

use std::process::Stdio;

use crate::common::gguf::{Key, rewrite};
use crate::common::{Place, Tensors, finish, golden, ids};

/// Largest absolute differences, as the data's description gives them.
const FEATURES: f32 = 5e-4;
const STAGE: f32 = 5e-5;
const LOGITS: f32 = 1e-3;

fn off(ours: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(ours.len(), expected.len());
    let differences = ours.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst: f32, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

/// A folder with a plan of the model in it, its files, its sound and its picture.
fn prepared(family: &str) -> Option<(Place, Tensors)> {
    let (place, folder) = (Place::new(), golden::some().join("vision"));
    if !golden::has(&format!("vision/v_tiny_{family}")) {
        return None;
    }
    for ending in ["gguf", "mmproj.gguf", "png"] {
        std::fs::copy(folder.join(format!("v_tiny_{family}.{ending}")), place.path(&format!("model.{ending}")))
            .unwrap();
    }
    std::fs::copy(folder.join(format!("a_tiny_{family}.wav")), place.path("a.wav")).unwrap();
    place.ok("compile model.gguf --mmproj model.mmproj.gguf --image-tokens 70 --target cpu -o plan.bin");
    Some((place, Tensors::read(&folder.join(format!("a_tiny_{family}.golden.safetensors")))))
}

#[test]
fn every_stage_is_the_references() {
    for family in ["e", "u"] {
        let Some((place, golden)) = prepared(family) else { continue };
        let stages = golden.names().filter(|key| key.starts_with("audio.") && *key != "audio.pcm");
        // Raw frames are the samples themselves, and no value of the tower.
        let stages: Vec<String> =
            stages.filter(|key| family == "e" || *key != "audio.features").map(String::from).collect();
        assert!(stages.len() >= if family == "e" { 10 } else { 1 }, "{family}: {stages:?}");
        let (prompt, greedy) = (ids(&golden.ids("tokens")), golden.ids("greedy.tokens"));
        let taps: String = stages.iter().map(|stage| format!(" --tap {stage}")).collect();
        let ours =
            place.logits("plan.bin", &format!("--tokens {prompt} --all --audio a.wav --tap embedding.out{taps}"));
        for stage in &stages {
            let worst = off(&ours.get(stage).values, &golden.get(stage).values);
            let limit = if stage == "audio.features" { FEATURES } else { STAGE };
            assert!(worst <= limit, "{family}: {stage} is off by {worst:e}");
        }
        assert!(off(&ours.get("embedding.out").values, &golden.get("embed").values) <= STAGE, "{family}: embed");
        let worst = off(&ours.get("logits").values, &golden.get("logits").values);
        assert!(worst <= LOGITS, "{family}: logits are off by {worst:e}");
        let chosen = place.ok(&format!("run plan.bin --tokens {prompt} --temp 0 -n {} --audio a.wav", greedy.len()));
        assert_eq!(chosen.trim_end(), greedy.iter().map(u32::to_string).collect::<Vec<_>>().join(" "), "{family}");
        // A sound is causal, so that it may be cut anywhere.
        let cut = place.logits("plan.bin", &format!("--tokens {prompt} --all --audio a.wav --chunk 7"));
        assert!(cut.get("logits") == ours.get("logits"), "{family}: chunks");
    }
}

/// A WAV of 16-bit samples.
fn wav(rate: u32, channels: u16, samples: &[i16]) -> Vec<u8> {
    let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let format = [
        &1u16.to_le_bytes()[..],
        &channels.to_le_bytes(),
        &rate.to_le_bytes(),
        &(rate * 2 * u32::from(channels)).to_le_bytes(),
        &(2 * channels).to_le_bytes(),
        &16u16.to_le_bytes(),
    ]
    .concat();
    let body =
        [b"WAVEfmt ", &16u32.to_le_bytes()[..], &format, b"data", &(data.len() as u32).to_le_bytes(), &data].concat();
    [b"RIFF", &(body.len() as u32).to_le_bytes()[..], &body].concat()
}

/// Frames of a silent MP3, 417 or 418 bytes for 1152 samples of 44,100 a second.
fn silent_mp3(frames: usize) -> Vec<u8> {
    let frame = [&[0xff, 0xfb, 0x90, 0x00][..], &[0; 413]].concat();
    frame.repeat(frames)
}

/// A FLAC of one channel whose frames hold samples as they are.
fn flac(rate: u32, samples: &[i16]) -> Vec<u8> {
    let crc = |bytes: &[u8], width: u32, polynomial: u32| {
        let step = |crc: u32, _| if crc >> (width - 1) & 1 == 1 { crc << 1 ^ polynomial } else { crc << 1 };
        let byte = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte) << (width - 8), step) & ((1 << width) - 1);
        bytes.iter().fold(0, byte)
    };
    let block = 4096u16;
    let mut about = [block.to_be_bytes(), block.to_be_bytes()].concat();
    about.extend([0; 6]);
    // 20 bits of rate, 3 of channels less 1, 5 of bits less 1, 36 of samples.
    about.extend((u64::from(rate) << 44 | 15 << 36 | samples.len() as u64).to_be_bytes());
    about.extend([0; 16]);
    let mut file = [b"fLaC", &[0x80, 0, 0, 34][..], &about].concat();
    for (number, piece) in samples.chunks(block.into()).enumerate() {
        // The length follows in 16 bits; the rate is that of the file; 16 bits a sample.
        let mut frame = vec![0xff, 0xf8, 0x70, 0x08, number as u8];
        frame.extend((piece.len() as u16 - 1).to_be_bytes());
        frame.push(crc(&frame, 8, 0x07) as u8);
        frame.push(0x02);
        frame.extend(piece.iter().flat_map(|sample| sample.to_be_bytes()));
        frame.extend((crc(&frame, 16, 0x8005) as u16).to_be_bytes());
        file.extend(frame);
    }
    file
}

#[test]
fn formats_rates_and_company() {
    let Some((place, golden)) = prepared("e") else { return };
    let prompt = ids(&golden.ids("tokens"));
    let pcm: Vec<i16> = golden.get("audio.pcm").values.iter().map(|sample| *sample as i16).collect();
    let features = |file: &str| {
        let ours = place.logits("plan.bin", &format!("--tokens {prompt} --audio {file} --tap audio.features"));
        ours.get("audio.features").values.clone()
    };
    let original = features("a.wav");
    // The same samples in another format, or twice side by side, are the same sound.
    place.write("a.flac", flac(16_000, &pcm));
    assert!(features("a.flac") == original);
    place.write("stereo.wav", wav(16_000, 2, &pcm.iter().flat_map(|sample| [*sample; 2]).collect::<Vec<_>>()));
    assert!(features("stereo.wav") == original);
    // A tone at another rate has nearly the same features.
    let tone = |rate: u32, samples: usize| {
        let angle = |n: usize| std::f64::consts::TAU * 1000.0 * n as f64 / f64::from(rate);
        wav(rate, 1, &(0..samples).map(|n| (20_000.0 * angle(n).sin()) as i16).collect::<Vec<_>>())
    };
    place.write("tone16.wav", tone(16_000, 19_000));
    place.write("tone48.wav", tone(48_000, 57_000));
    let (at_16, at_48) = (features("tone16.wav"), features("tone48.wav"));
    // Bins that hold the tone itself, away from its ends; the others hold what was rounded.
    let inner = 384..at_16.len() - 384;
    let loud = at_16[inner.clone()].iter().zip(&at_48[inner]).filter(|(a, _)| **a > 0.0);
    assert!(loud.clone().count() > 300);
    let worst = loud.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 0.01, "{worst}");
    place.write("silence.mp3", silent_mp3(40));
    let ran = place.run("run plan.bin -p hello --temp 0 -n 2 --audio silence.mp3");
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);

    // Media stand before the text in the order of the command line.
    let told = |line: &str| {
        let ran = place.run(&format!("run plan.bin --temp 0 -n 8 {line}"));
        assert_eq!(ran.code, Some(0), "{line}\n{}", ran.stderr);
        let prompt = ran.stderr.split("[prefill: ").nth(1).and_then(|rest| rest.split(' ').next());
        (prompt.expect("a count").parse::<usize>().expect("a number"), ran.stdout)
    };
    let (sound, picture) = (32, 62);
    for text in ["-p hello", "--chat -p hello"] {
        let none = told(text);
        let first = told(&format!("{text} --audio a.wav --image model.png"));
        let second = told(&format!("{text} --image model.png --audio a.wav"));
        let three = told(&format!("{text} --audio a.wav --image model.png --audio a.flac"));
        assert_eq!((first.0, second.0), (none.0 + sound + picture, none.0 + sound + picture), "{text}");
        assert_eq!(three.0, none.0 + 2 * sound + picture, "{text}");
        assert!(first.1 != second.1, "{text}: {}", first.1);
    }
    let plan = place.ok("inspect plan.bin");
    assert!(plan.contains("tower audio") && plan.contains("one for 4 frames of 128 bins"), "{plan}");
}

/// Media of a conversation belong to the question after them; a file that is none does not end it.
#[test]
fn a_conversation_takes_media() {
    let Some((place, _)) = prepared("e") else { return };
    let prompts = |lines: &str| {
        place.write("lines.txt", lines);
        let mut command = place.command("run plan.bin --chat --temp 0 -n 1");
        command.stdin(Stdio::from(std::fs::File::open(place.path("lines.txt")).unwrap()));
        let ran = finish(&mut command);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let counts =
            ran.stderr.split("[prefill: ").skip(1).map(|rest| rest.split(' ').next().unwrap().parse().unwrap());
        (counts.collect::<Vec<usize>>(), ran.stderr)
    };
    let (plain, _) = prompts("hello\nhello\n");
    let (with, told) = prompts("/audio nothing.wav\n/audio a.wav\n/image model.png\nhello\nhello\n");
    assert!(told.contains("nothing.wav"), "{told}");
    assert_eq!((plain.len(), with.len()), (2, 2));
    assert_eq!(with[0], plain[0] + 32 + 62, "{told}");
}

#[test]
fn each_refusal_has_its_words() {
    let Some((place, golden)) = prepared("e") else { return };
    let prompt = ids(&golden.ids("tokens"));
    let sound = place.read("a.wav");
    place.write("cut.wav", &sound[..20_000]);
    let mut lying = sound.clone();
    lying[40..44].copy_from_slice(&u32::MAX.to_le_bytes());
    place.write("lying.wav", &lying);
    place.write("long.wav", wav(8_000, 1, &vec![0; 8_000 * 30 + 1]));
    place.write("short.wav", wav(16_000, 1, &[0; 160]));
    place.write("fast.wav", wav(1_000_000, 1, &[0; 160]));
    place.write("zip.wav", b"PK\x03\x04 and so on");
    place.write("noise.mp3", [&[0xff, 0xfb, 0x90, 0x00][..], b"nothing of the kind"].concat());
    let other_kind = |key: &str| if key == "clip.audio.projector_type" { Key::Set("other".into()) } else { Key::Keep };
    rewrite(&place.path("model.mmproj.gguf"), &place.path("other.gguf"), other_kind, |tensor| {
        Some(tensor.dims().to_vec())
    });
    rewrite(
        &place.path("model.mmproj.gguf"),
        &place.path("less.gguf"),
        |_| Key::Keep,
        |tensor| (!tensor.name.starts_with("a.blk.1.conv_dw")).then(|| tensor.dims().to_vec()),
    );
    let deaf = |key: &str| if key == "clip.has_audio_encoder" { Key::Set(false.into()) } else { Key::Keep };
    rewrite(&place.path("model.mmproj.gguf"), &place.path("deaf.gguf"), deaf, |tensor| Some(tensor.dims().to_vec()));
    place.ok("compile model.gguf --mmproj deaf.gguf --image-tokens 70 --target cpu -o deaf.bin");
    let logits = format!("logits plan.bin --tokens {prompt} -o out.safetensors");
    let mut texts = String::new();
    for (name, line) in [
        ("no sound", logits.clone()),
        ("a cut sound", format!("{logits} --audio cut.wav")),
        ("a sound that lies about its length", format!("{logits} --audio lying.wav")),
        ("a long sound", format!("{logits} --audio long.wav")),
        ("a short sound", format!("{logits} --audio short.wav")),
        ("a rate beyond all", format!("{logits} --audio fast.wav")),
        ("an archive", format!("{logits} --audio zip.wav")),
        ("a picture", format!("{logits} --audio model.png")),
        ("a sound as a picture", format!("{logits} --image a.wav")),
        ("no MP3", format!("{logits} --audio noise.mp3")),
        ("a tap of a sound that is not there", format!("{logits} --tap audio.features")),
        ("a tap that is not there", format!("{logits} --audio a.wav --tap audio.nothing")),
        ("a projector without sound", "run deaf.bin -p hello --audio a.wav".into()),
        ("another projector", "compile model.gguf --mmproj other.gguf --target cpu -o p.bin".into()),
        ("a projector that lacks a tensor", "compile model.gguf --mmproj less.gguf --target cpu -o p.bin".into()),
    ] {
        texts += &format!("{name}\n    {}", place.refused(&line).replace('\n', "\n    ").trim_end_matches(' '));
    }
    assert_text!("errors", "audio", texts);
}
