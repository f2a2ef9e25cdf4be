//! What a server says of its requests: one line each, however it ends.

use std::io::{Read, Write};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use gemma4c_serve::{Notice, Options, RequestLine, Sink};
use serde_json::json;

use crate::slow::{long, slow, until};
use crate::support::{Response, Server, options};

fn noticing(options: Options) -> (Options, Receiver<Notice>) {
    let (told, notices) = channel();
    (Options { sink: Some(Sink::new(move |notice| _ = told.send(notice))), ..options }, notices)
}

fn line(notices: &Receiver<Notice>) -> RequestLine {
    match notices.recv_timeout(Duration::from_secs(60)).expect("a line") {
        Notice::Request(line) => *line,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_request_has_one_line_when_it_has_ended() {
    let (options, notices) = noticing(Options { api_keys: "secret-key".into(), ..options() });
    let server = Server::new(options, 2);
    let post = |path: &str, body: &str, more: &str| {
        let headers = format!("authorization: Bearer secret-key\r\nconnection: close\r\n{more}");
        Response::read(server.send("POST", path, &headers, body.as_bytes()))
    };
    let mut said = String::new();
    for stream in [false, true] {
        let request = json!({ "prompt": "Tell nobody", "max_tokens": 3, "ignore_eos": true, "n": 2, "stream": stream });
        let answer = post("/v1/completions", &request.to_string(), "x-request-id: mine\r\n");
        let line = line(&notices);
        assert_eq!((answer.status, line.status), (200, 200));
        assert_eq!(
            (line.method.as_str(), line.path.as_str(), line.model.as_deref()),
            ("POST", "/v1/completions", Some("tiny"))
        );
        assert_eq!((line.request_id.as_str(), line.client.ip()), ("mine", server.address.ip()));
        assert_eq!((line.output_tokens, line.finish_reason.as_deref(), line.error), (Some(6), Some("length"), None));
        assert!(line.prompt_tokens.unwrap() > 2 && line.cached_tokens.is_some());
        assert!(line.first_token.unwrap() <= line.total);
        said.push_str(&format!("{line:?}"));
    }
    // Refused: by its fields, by its path, without a key. A query is no part of a path.
    for (path, body, status, error) in [
        ("/v1/completions?secret", "{}", 400, "invalid_value"),
        ("/v1/completions", "{", 400, "json_parse_error"),
        ("/nowhere", "{}", 404, "unknown_url"),
    ] {
        post(path, body, "");
        let line = line(&notices);
        assert_eq!((line.status, line.error, line.prompt_tokens), (status, Some(error), None), "{path}");
        said.push_str(&format!("{line:?}"));
    }
    server.post("/v1/completions", &json!({}));
    let refused = line(&notices);
    assert_eq!((refused.status, refused.error), (401, Some("invalid_api_key")));
    assert!(refused.request_id.starts_with("req_"), "{refused:?}");
    // What is asked every few seconds is not told, unless it fails; nor is what is no request left out.
    assert_eq!((server.get("/health").status, server.get("/metrics").status), (200, 200));
    server.request("POST", "/health", b"");
    let line_of_probe = line(&notices);
    assert_eq!((line_of_probe.path.as_str(), line_of_probe.status), ("/health", 405));
    let mut stream = server.connect();
    stream.write_all(b"\x16\x03\x01\x02\r\n\r\n").unwrap();
    assert_eq!(Response::read(stream).status, 400);
    let none = line(&notices);
    assert_eq!((none.status, none.error), (400, Some("bad_head")));
    assert!(!said.contains("secret") && !said.contains("nobody"), "{said}");
    drop(server);
    assert!(notices.try_iter().next().is_none());
}

#[test]
fn a_request_that_is_cut_has_its_line_too() {
    let (options, notices) = noticing(options());
    let server = slow(options, 1);
    // While it is answered, and before anything was.
    let mut streamed = server.send("POST", "/v1/completions", "", long(true).to_string().as_bytes());
    streamed.read_exact(&mut [0; 400]).unwrap();
    let waiting = server.send("POST", "/v1/completions", "", long(false).to_string().as_bytes());
    until("it waits", || server.metric("num_requests_waiting") == 1.0);
    drop(waiting);
    let before = line(&notices);
    assert_eq!((before.status, before.error, before.output_tokens), (499, Some("client_gone"), None));
    drop(streamed);
    let within = line(&notices);
    assert_eq!((within.status, within.error, within.finish_reason), (200, Some("client_gone"), None));
    assert!(within.output_tokens.unwrap() > 0 && within.first_token.is_some());
}

#[test]
fn a_server_that_ends_says_what_it_waits_for() {
    let (options, notices) = noticing(options());
    let server = slow(options, 1);
    let mut stream = server.send("POST", "/v1/completions", "connection: close\r\n", long(true).to_string().as_bytes());
    stream.read_exact(&mut [0; 1]).unwrap();
    server.signal();
    match notices.recv_timeout(Duration::from_secs(60)).expect("a notice") {
        Notice::Draining { requests: 1, left, .. } => assert!(left <= Duration::from_secs(30)),
        other => panic!("{other:?}"),
    }
    server.signal();
    assert!(matches!(notices.recv_timeout(Duration::from_secs(60)), Ok(Notice::Cut { requests: 1 })));
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    let cut = line(&notices);
    assert_eq!((cut.status, cut.error), (200, Some("draining")));
    server.wait();
}

/// As names have several addresses, such a server has several sockets.
#[test]
fn a_name_is_listened_at() {
    let server = Server::new(Options { host: "localhost".into(), ..options() }, 1);
    assert!(server.address.ip().is_loopback());
    assert_eq!(server.get("/health").status, 200);
    let port = server.address.port();
    let all = std::net::ToSocketAddrs::to_socket_addrs(&("localhost", port)).unwrap();
    for address in all {
        // An address of the name that this machine does not have is left out.
        if std::net::TcpListener::bind((address.ip(), 0)).is_ok() {
            std::net::TcpStream::connect(address).unwrap();
        }
    }
}
