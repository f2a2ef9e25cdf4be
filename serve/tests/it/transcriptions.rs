//! Transcriptions: a sound's text is that of a chat about it, a long one's that of its pieces.

use gemma4c_models::media;
use serde_json::{Value, json};

use crate::seeing::{base64, seeing, tone, wav};
use crate::support::{Response, Server, options};

const INSTRUCTION: &str =
    "Transcribe this speech segment in its original language. Only output the transcription, with no newlines.";

/// A form of these fields, with the content type that says so.
pub fn form(fields: &[(&str, &[u8])]) -> Vec<u8> {
    let part = |(name, content): &(&str, &[u8])| {
        let file = if *name == "file" { "; filename=\"a.wav\"\r\ncontent-type: audio/wav" } else { "" };
        let head = format!("--BOUNDARY\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n");
        [head.as_bytes(), content, b"\r\n"].concat()
    };
    [fields.iter().map(part).collect::<Vec<_>>().concat(), b"--BOUNDARY--\r\n".to_vec()].concat()
}

pub fn send(server: &Server, body: &[u8]) -> Response {
    let headers = "connection: close\r\ncontent-type: multipart/form-data; boundary=BOUNDARY\r\n";
    Response::read(server.send("POST", "/v1/audio/transcriptions", headers, body))
}

fn transcribe(server: &Server, sound: &[u8], more: &[(&str, &str)]) -> Response {
    let more = more.iter().map(|(name, text)| (*name, text.as_bytes()));
    let fields: Vec<(&str, &[u8])> =
        [("file", sound), ("model", b"tiny"), ("max_tokens", b"9")].into_iter().chain(more).collect();
    send(server, &form(&fields))
}

fn asked(server: &Server, sound: &[u8], instruction: &str) -> (String, u64) {
    let audio = json!({ "type": "input_audio", "input_audio": { "data": base64(sound), "format": "wav" } });
    let content = json!([audio, { "type": "text", "text": instruction }]);
    let request = json!({ "messages": [{ "role": "user", "content": content }], "temperature": 0, "max_tokens": 9 });
    let answer = server.post("/v1/chat/completions", &request);
    assert_eq!(answer.status, 200, "{}", answer.text);
    let answer = answer.json();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap().trim().to_owned();
    (text, answer["usage"]["prompt_tokens"].as_u64().unwrap())
}

/// The deltas of a stream, whose bytes are these and nothing else.
fn deltas(stream: &Response, text: &str, usage: &Value) -> Vec<String> {
    assert!(stream.head.contains("content-type: text/event-stream"), "{}", stream.head);
    let events = stream.events();
    let deltas: Vec<String> = events.iter().filter_map(|event| event["delta"].as_str().map(String::from)).collect();
    let line = |delta: &String| format!("data: {{\"type\":\"transcript.text.delta\",\"delta\":{}}}\n\n", json!(delta));
    let done = format!("data: {{\"type\":\"transcript.text.done\",\"text\":{},\"usage\":{usage}}}\n\n", json!(text));
    assert_eq!(stream.text, deltas.iter().map(line).collect::<String>() + &done);
    deltas
}

#[test]
fn a_short_sound_has_the_text_of_a_chat_about_it() {
    let server = seeing(options());
    let sound = wav(&tone(12, &[6]));
    let (text, prompt) = asked(&server, &sound, INSTRUCTION);
    let answer = transcribe(&server, &sound, &[]);
    assert_eq!(answer.status, 200, "{}", answer.text);
    let usage = json!({ "type": "tokens", "input_tokens": prompt, "output_tokens": 9, "total_tokens": prompt + 9 });
    assert_eq!(answer.json(), json!({ "text": text, "usage": usage }));
    let plain = transcribe(&server, &sound, &[("response_format", "text")]);
    assert_eq!(plain.text, format!("{text}\n"));
    assert!(plain.head.contains("content-type: text/plain; charset=utf-8"), "{}", plain.head);
    let stream = transcribe(&server, &sound, &[("stream", "true"), ("temperature", "0"), ("language", "")]);
    assert_eq!(deltas(&stream, &text, &usage).concat(), text);

    // Language and prompt are part of the instruction.
    let sentence = "Transcribe this speech segment in German. Only output the transcription, with no newlines. This came before it, or has words that occur in it: Łódź";
    let (text, _) = asked(&server, &sound, sentence);
    let answer = transcribe(&server, &sound, &[("language", "de"), ("prompt", "Łódź"), ("response_format", "json")]);
    assert_eq!(answer.json()["text"], text.as_str());
    // A seed replays what is sampled.
    let [first, second] = [0, 1].map(|_| transcribe(&server, &sound, &[("temperature", "0.9"), ("seed", "3")]).json());
    assert_eq!(first, second);
}

#[test]
fn a_long_sound_has_the_texts_of_its_pieces() {
    let server = seeing(options());
    let samples = tone(650, &[260, 510]);
    let floats: Vec<f32> = samples.iter().map(|sample| f32::from(*sample) / 32768.0).collect();
    let pieces = media::split(&floats);
    let ends: Vec<f64> = pieces.iter().map(|piece| piece.end as f64 / f64::from(media::RATE)).collect();
    assert!(ends.len() == 3 && (ends[0] - 26.0).abs() < 0.2 && (ends[1] - 51.0).abs() < 0.2, "{ends:?}");
    let asked = pieces.iter().map(|piece| asked(&server, &wav(&samples[piece.clone()]), INSTRUCTION));
    let (texts, prompts): (Vec<String>, Vec<u64>) = asked.unzip();
    let (text, prompt) = (texts.join(" "), prompts.iter().sum::<u64>());
    let sound = wav(&samples);
    let answer = transcribe(&server, &sound, &[]);
    assert_eq!(answer.status, 200, "{}", answer.text);
    let answer = answer.json();
    assert_eq!(answer["text"], text.as_str());
    assert_eq!(answer["usage"]["input_tokens"], prompt);
    let stream = transcribe(&server, &sound, &[("stream", "true")]);
    let deltas = deltas(&stream, &text, &answer["usage"]);
    assert!(deltas.len() >= 3 && deltas.concat() == text, "{deltas:?}");
}

#[test]
fn what_cannot_be_transcribed_is_refused_by_name() {
    let server = seeing(options());
    let sound = wav(&tone(3, &[]));
    let part = |name: &'static str, text: &'static str| -> Vec<(&'static str, &'static [u8])> {
        vec![(name, text.as_bytes())]
    };
    for (fields, param, word) in [
        (part("response_format", "srt"), "response_format", "needs times, and the model tells none"),
        (part("response_format", "vtt"), "response_format", "needs times"),
        (part("response_format", "verbose_json"), "response_format", "needs times"),
        (part("response_format", "xml"), "response_format", "expected json or text"),
        (part("timestamp_granularities[]", "word"), "timestamp_granularities[]", "without times"),
        (part("include[]", "logprobs"), "include[]", "without log probabilities"),
        (part("temperature", "hot"), "temperature", "must be a number"),
        (part("temperature", "7"), "temperature", "must be a number from 0 to 2"),
        (part("stream", "perhaps"), "stream", "must be true or false"),
        (part("language", "en\nand then"), "language", "must be a code"),
        (part("model", "whisper-1"), "model", "there is no model"),
        (part("n", "2"), "n", "must be 1"),
        (part("prompt", "\u{0}"), "", ""),
    ] {
        let fields: Vec<(&str, &[u8])> = [vec![("file", sound.as_slice())], fields].concat();
        let answer = send(&server, &form(&fields));
        if param.is_empty() {
            assert_eq!(answer.status, 200, "{}", answer.text);
            continue;
        }
        let error = &answer.json()["error"];
        assert!([400, 404].contains(&answer.status) && error["param"] == param, "{}", answer.text);
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
    let silent = wav(&[]);
    for (sound, word) in [
        (&b"RIFF"[..], "file: it is not a sound in WAV, FLAC or MP3"),
        (&sound[..sound.len() / 2], "bytes of samples"),
        (&silent, "too few for one soft token"),
        (b"", "it is not a sound"),
    ] {
        let answer = transcribe(&server, sound, &[]);
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (400, &json!("file")), "{}", answer.text);
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
    let without = send(&server, &form(&[("model", b"tiny")]));
    assert_eq!((without.status, &without.json()["error"]["message"]), (400, &json!("file is missing")));
    let twice = send(&server, &form(&[("file", &sound), ("seed", b"1"), ("seed", b"2")]));
    assert_eq!((twice.status, &twice.json()["error"]["param"]), (400, &json!("seed")));
    let cut = send(&server, &form(&[("file", &sound)])[..500]);
    assert!(cut.status == 400 && cut.text.contains("it ends within a part"), "{}", cut.text);
    let json = server.post("/v1/audio/transcriptions", &json!({ "file": "x" }));
    assert!(json.status == 400 && json.text.contains("multipart/form-data"), "{}", json.text);

    let deaf = Server::new(options(), 1);
    let answer = transcribe(&deaf, &sound, &[]);
    let message = "file: the plan has no tower for sounds; it reads text";
    assert_eq!((answer.status, &answer.json()["error"]["message"]), (400, &json!(message)));
}
