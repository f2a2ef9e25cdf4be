//! Pictures and sounds over HTTP: answered as `run` answers them, and bad ones refused one by one, within bounds of
//! memory, while others are served.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Child;

use base64::prelude::{BASE64_STANDARD, Engine};
use serde_json::{Value, json};

use crate::common::{Place, golden};
use crate::serve::{end, start_with_towers};

/// A server that does not outlive a test that fails.
struct Running(Option<Child>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(server) = &mut self.0 {
            server.kill().ok();
        }
    }
}

fn post(url: &str, path: &str, body: &Value) -> (u16, Value) {
    let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).unwrap();
    let body = body.to_string();
    let length = body.len();
    write!(stream, "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}")
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap())
}

fn picture(bytes: &[u8]) -> Value {
    json!({ "type": "image_url", "image_url": { "url": format!("data:image/png;base64,{}", BASE64_STANDARD.encode(bytes)) } })
}

fn sound(bytes: &[u8]) -> Value {
    json!({ "type": "input_audio", "input_audio": { "data": BASE64_STANDARD.encode(bytes), "format": "wav" } })
}

fn ask(parts: &[Value]) -> Value {
    let parts = [parts, &[json!({ "type": "text", "text": "What is it?" })]].concat();
    json!({ "messages": [{ "role": "user", "content": parts }], "temperature": 0, "max_tokens": 6 })
}

fn chunk(name: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let body = [name, data].concat();
    let crc = body.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    });
    [&(data.len() as u32).to_be_bytes(), body.as_slice(), &(!crc).to_be_bytes()].concat()
}

/// A PNG of RGB pixels whose header says this size, with these chunks behind it.
fn png(width: u32, height: u32, chunks: &[Vec<u8>]) -> Vec<u8> {
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    [b"\x89PNG\r\n\x1a\n".to_vec(), chunk(b"IHDR", &header), chunks.concat(), chunk(b"IEND", &[])].concat()
}

/// A zlib stream of so many kilobytes of zeros, a thousand times as small: a match of 258 bytes takes two bits.
fn zeros(kilobytes: usize) -> Vec<u8> {
    // One block of fixed codes: a literal zero, then matches of length 258 (code 11000101) at distance 1 (code 00000),
    // then the end (0000000).
    let mut bits: Vec<u8> = vec![1, 1, 0];
    bits.extend([0, 0, 1, 1, 0, 0, 0, 0]);
    for _ in 0..kilobytes * 1024 / 258 {
        bits.extend([1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0]);
    }
    bits.extend([0; 7]);
    let byte = |bits: &[u8]| bits.iter().enumerate().fold(0, |byte, (at, bit)| byte | bit << at);
    [&[0x78, 0x01][..], &bits.chunks(8).map(byte).collect::<Vec<u8>>()].concat()
}

/// The most memory that a process has had, in kilobytes.
fn peak(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn pictures_and_sounds_are_answered_and_bad_ones_refused() {
    let Some(folder) = golden::folder() else { return };
    let place = Place::new();
    let (server, url, file) = start_with_towers(&place, &folder);
    let id = server.id();
    let mut running = Running(Some(server));
    let good = std::fs::read(&file).unwrap();
    let wav = std::fs::read(folder.join("vision/a_tiny_e.wav")).unwrap();
    let chat = |parts: &[Value]| post(&url, "/v1/chat/completions", &ask(parts));
    let content = |answer: &Value| answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();

    let (status, answer) = chat(&[picture(&good)]);
    assert_eq!(status, 200, "{answer}");
    let ran = place.ok(&format!("run seeing.bin --chat --image {file} -p What --temp 0 -n 6"));
    let question = json!({ "messages": [{ "role": "user", "content": [picture(&good), { "type": "text", "text": "What" }] }], "temperature": 0, "max_tokens": 6 });
    let (_, asked) = post(&url, "/v1/chat/completions", &question);
    assert_eq!(content(&asked).trim(), ran.trim(), "as `run` answers");
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 60, "soft tokens count: {answer}");
    let (_, again) = chat(&[picture(&good)]);
    assert_eq!(content(&again), content(&answer));
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 60, "{again}");
    // Soft tokens that a picture takes, as it is looked at.
    let soft = |more: Value| {
        let mut looked = picture(&good);
        looked["image_url"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = chat(&[looked]);
        (status, answer["usage"]["prompt_tokens"].as_u64().ok_or(answer["error"].to_string()))
    };
    let (low, auto) = (soft(json!({ "detail": "low" })), soft(json!({ "detail": "auto" })));
    assert_eq!(auto, (200, Ok(answer["usage"]["prompt_tokens"].as_u64().unwrap())));
    assert!(low.1.clone().unwrap() <= auto.1.unwrap(), "{low:?}");
    assert_eq!(soft(json!({ "soft_tokens": 70 })), low);
    let (status, refused) = soft(json!({ "soft_tokens": 1120 }));
    assert_eq!((status, refused.unwrap_err().contains("room for")), (400, true));
    assert_eq!(chat(&[sound(&wav)]).0, 200);
    assert_eq!(chat(&[picture(&good), sound(&wav), picture(&good)]).0, 200);
    let item = json!({ "type": "input_image", "image_url": picture(&good)["image_url"]["url"] });
    let text = json!({ "type": "input_text", "text": "What is it?" });
    let response =
        json!({ "input": [{ "role": "user", "content": [item, text] }], "temperature": 0, "max_output_tokens": 6 });
    let (status, response) = post(&url, "/v1/responses", &response);
    assert_eq!(
        (status, response["output"][0]["content"][0]["text"].as_str().unwrap()),
        (200, content(&answer).as_str())
    );

    // The same picture through ollama's API.
    let options = json!({ "temperature": 0, "num_predict": 6 });
    let images = json!([BASE64_STANDARD.encode(&good)]);
    let message = json!({ "role": "user", "content": "What is it?", "images": images });
    let request = json!({ "messages": [message], "options": options, "stream": false });
    let (status, chatted) = post(&url, "/api/chat", &request);
    assert_eq!((status, chatted["message"]["content"].as_str()), (200, Some(content(&answer).as_str())), "{chatted}");
    let request = json!({ "prompt": "What is it?", "images": images, "options": options, "stream": false });
    let (status, generated) = post(&url, "/api/generate", &request);
    assert_eq!((status, &generated["response"]), (200, &chatted["message"]["content"]), "{generated}");
    let sounds = json!([BASE64_STANDARD.encode(&wav)]);
    let request = json!({ "prompt": "What is it?", "images": sounds, "options": options, "stream": false });
    let (status, heard) = post(&url, "/api/generate", &request);
    let (_, ours) = chat(&[sound(&wav)]);
    assert_eq!((status, heard["response"].as_str()), (200, Some(content(&ours).as_str())), "{heard}");

    let before = peak(id);
    let mut lying = wav.clone();
    lying[40..44].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
    let bomb = chunk(b"IDAT", &zeros(100 << 10));
    let profile = chunk(b"iCCP", &[b"x\0\0".to_vec(), zeros(100 << 10)].concat());
    let note = chunk(b"zTXt", &[b"x\0\0".to_vec(), zeros(100 << 10)].concat());
    let remote = |url: &str| json!({ "type": "image_url", "image_url": { "url": url } });
    let text = json!({ "messages": [{ "role": "user", "content": "Hi" }], "temperature": 0, "max_tokens": 4 });
    let alone = content(&post(&url, "/v1/chat/completions", &text).1);
    for (what, part, word) in [
        ("a huge header", picture(&png(100_000, 100_000, &[chunk(b"IDAT", &zeros(1))])), "100000 x 100000 pixels"),
        ("a compressed profile", picture(&png(8, 8, std::slice::from_ref(&profile))), ""),
        ("a compressed text", picture(&png(8, 8, std::slice::from_ref(&note))), ""),
        ("a cut JPEG", picture(&[0xff, 0xd8, 0xff, 0xe0, 0, 4, 0, 0, 0xff, 0xda, 0, 2, 1, 2, 3]), "cut"),
        ("a cut PNG", picture(&good[..good.len() / 2]), ""),
        ("a drawing", picture(b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>"), "svg"),
        ("an unknown type", picture(b"%PDF-1.7 and more"), "PNG, JPEG, WebP or GIF"),
        ("no base64", remote("data:image/png;base64,%%%"), "base64"),
        ("a WAV that lies", sound(&lying), "2147483647 bytes"),
        ("no sound", sound(b"hello"), "WAV, FLAC or MP3"),
        ("this machine", remote(&format!("{url}/health")), "no public address"),
        ("its name", remote("http://localhost/x.png"), "no public address"),
        ("its network", remote("http://169.254.169.254/latest"), "no public address"),
        ("its disk", remote("file:///etc/passwd"), "must begin with data:"),
    ] {
        let (status, answer) = chat(&[picture(&good), part]);
        let error = &answer["error"];
        assert_eq!((status, &error["param"]), (400, &json!("messages[0].content[1]")), "{what}: {answer}");
        assert!(error["message"].as_str().unwrap().contains(word), "{what}: {error}");
        assert_eq!(content(&post(&url, "/v1/chat/completions", &text).1), alone, "others go on after {what}");
    }
    // What expands without end behind, or before, pixels that are whole is not unpacked: such a picture may be read.
    for chunks in [vec![bomb.clone()], vec![profile, bomb.clone()], vec![note, bomb]] {
        let (status, answer) = chat(&[picture(&png(8, 8, &chunks))]);
        assert!([200, 400].contains(&status), "{answer}");
    }
    let grown = peak(id).saturating_sub(before);
    assert!(grown < 100 << 10, "bad files took {grown} kB");
    end(running.0.take().unwrap());
}
