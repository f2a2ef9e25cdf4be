//! Films: their frames, each behind its time.

use serde_json::{Value, json};

use crate::seeing::{base64, png, seeing};
use crate::support::options;

#[test]
fn a_film_is_its_frames_with_their_times() {
    let server = seeing(options());
    let frames = [[200, 10, 10], [10, 200, 10]].map(|colour| base64(&png(colour)));
    let ask = |film: Value| {
        let content = json!([film, { "type": "text", "text": "What happens? <|video|>" }]);
        json!({ "messages": [{ "role": "user", "content": content }], "max_tokens": 4, "temperature": 0 })
    };
    let joined = ask(
        json!({ "type": "video_url", "video_url": { "url": format!("data:video/jpeg;base64,{}", frames.join(",")) } }),
    );
    let listed = ask(json!({ "type": "video", "video": frames.map(|frame| format!("data:image/png;base64,{frame}")) }));

    let tokens = server.post("/tokenize", &joined).json()["tokens"].clone();
    let text = server.post("/detokenize", &json!({ "tokens": tokens })).json()["content"].clone();
    let text = text.as_str().expect("a text");
    let mut frames = text.split("<|image>");
    let begins = |part: Option<&str>, end: &str| part.is_some_and(|part| part.ends_with(end));
    assert!(begins(frames.next(), "00:00 ") && begins(frames.next(), "<|image|><image|> 00:01 "), "{text}");
    let rest = frames.next().expect("a second frame");
    let (soft, rest) = rest.split_once("<image|>").expect("its end");
    assert!(soft.len() > "<|image|>".len() && soft.replace("<|image|>", "").is_empty(), "{text}");
    assert!(rest.contains("What happens?") && frames.next().is_none(), "{text}");

    let answer = |body: &Value| {
        let response = server.post("/v1/chat/completions", body);
        assert_eq!(response.status, 200, "{}", response.text);
        response.json()["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(answer(&joined), answer(&listed));

    let wrong = server
        .post("/v1/chat/completions", &ask(json!({ "type": "video_url", "video_url": "data:video/mp4;base64,AAAA" })));
    assert_eq!((wrong.status, &wrong.json()["error"]["param"]), (400, &json!("messages[0].content[0].video_url")));
    let broken =
        server.post("/v1/chat/completions", &ask(json!({ "type": "video", "video": ["data:image/png;base64,AAAA"] })));
    assert_eq!(broken.status, 400, "{}", broken.text);
}
