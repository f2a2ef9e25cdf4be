//! Connections that are not what they should be: without a host, closed on one side, or left unread.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::channel;
use std::time::Duration;

use gemma4c_serve::{Notice, Options, Sink, Stall};
use serde_json::{Value, json};
use socket2::{Domain, SockRef, Socket, Type};

use crate::slow::{long, slow, until};
use crate::support::{Response, Server, options};

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_request_names_its_host_once() {
    let server = Server::new(options(), 1);
    for (version, hosts, status) in
        [("1.1", "", 400), ("1.1", "host: a\r\nhost: b\r\n", 400), ("1.1", "host: a\r\n", 200), ("1.0", "", 200)]
    {
        let mut stream = server.connect();
        stream.write_all(format!("GET /health HTTP/{version}\r\n{hosts}connection: close\r\n\r\n").as_bytes()).unwrap();
        let response = Response::read(stream);
        assert_eq!(response.status, status, "{version} {hosts:?} {}", response.text);
        if status == 400 {
            assert_eq!(response.json()["error"]["code"], "missing_host");
        }
    }
}

/// A client may say that it has no more to say, and wait for its answer.
#[test]
fn a_client_that_has_closed_its_side_gets_its_answer() {
    let server = slow(options(), 1);
    let short =
        |stream: bool| json!({ "prompt": "Hi", "max_tokens": 20, "ignore_eos": true, "stream": stream, "seed": 1 });
    let expected = server.post("/v1/completions", &short(false)).json()["choices"].clone();
    let close = |request: &Value| {
        let stream = server.send("POST", "/v1/completions", "", request.to_string().as_bytes());
        stream.shutdown(Shutdown::Write).unwrap();
        stream
    };
    // The later ones wait for their turn meanwhile.
    let asked = [close(&short(false)), close(&short(true)), close(&short(false))];
    for (stream, is_streamed) in asked.into_iter().zip([false, true, false]) {
        let response = Response::read(stream);
        assert_eq!(response.status, 200, "{}", response.text);
        match is_streamed {
            true => assert!(response.text.ends_with("data: [DONE]\n\n"), "{}", response.text),
            false => assert_eq!(response.json()["choices"], expected),
        }
    }
    // An answer that is there at once, and one that is an error.
    let mut stream = server.send("GET", "/v1/models", "", b"");
    stream.shutdown(Shutdown::Write).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    let stream = server.send("POST", "/v1/completions", "", b"{");
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(Response::read(stream).status, 400);
}

/// Whoever closes the whole connection while nothing was answered is found out too.
#[test]
fn a_client_that_has_gone_is_told_from_one_that_waits() {
    let server = slow(options(), 1);
    let body = long(false).to_string().into_bytes();
    let gone: Vec<TcpStream> = (0..3).map(|_| server.send("POST", "/v1/completions", "", &body)).collect();
    until("one runs and two wait", || {
        server.metric("num_requests_running") + server.metric("num_requests_waiting") == 3.0
    });
    let before = server.metric("generation_tokens_total");
    drop(gone);
    until("nothing is left", || server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0.0);
    let wasted = server.metric("generation_tokens_total") - before;
    assert!(wasted < 3.0 * 480.0 - before, "{wasted} tokens for nobody");
}

/// A stream of more bytes than the connection holds: a client's system takes megabytes for it, unless it is told not
/// to.
fn unread(server: &Server) -> TcpStream {
    let mut request = long(true);
    request["logprobs"] = json!(20);
    let request = request.to_string();
    let mut stream = server.connect();
    SockRef::from(&stream).set_recv_buffer_size(4096).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        request.len()
    );
    stream.write_all((head + &request).as_bytes()).unwrap();
    stream
}

fn errors(stall: Stall) -> (Options, std::sync::mpsc::Receiver<Option<&'static str>>) {
    let (told, lines) = channel();
    let sink = Sink::new(move |notice| {
        if let Notice::Request(line) = notice {
            _ = told.send(line.error);
        }
    });
    (Options { stall, sink: Some(sink), ..options() }, lines)
}

#[test]
fn a_request_is_not_kept_waiting_by_clients_that_do_not_read() {
    let (options, errors) = errors(Stall { contended: Duration::from_millis(1), at_most: HOUR });
    let server = slow(options, 1);
    let _unread: Vec<TcpStream> = (0..6).map(|_| unread(&server)).collect();
    until("one runs, and others wait", || server.metric("num_requests_waiting") > 1.0);
    let answer = server.post("/v1/completions", &json!({ "prompt": "Hi", "max_tokens": 1 }));
    assert_eq!(answer.status, 200, "{}", answer.text);
    let stalled = errors.try_iter().filter(|error| *error == Some("client_stalled")).count();
    assert!(stalled > 0, "nobody's request was ended");
}

#[test]
fn a_client_may_take_its_time_while_nobody_waits() {
    let (options, _errors) = errors(Stall { contended: Duration::from_millis(1), at_most: HOUR });
    let server = Server::new(options, 1);
    let stream = unread(&server);
    until("all of it is computed", || server.metric("request_generation_tokens_count") == 1.0);
    assert!(Response::read(stream).text.ends_with("data: [DONE]\n\n"));
}

#[test]
fn a_client_that_never_reads_does_not_stay() {
    let limit = Duration::from_millis(1);
    let (options, errors) = errors(Stall { contended: limit, at_most: limit });
    let server = Server::new(options, 1);
    let _stream = unread(&server);
    assert_eq!(errors.recv_timeout(Duration::from_secs(60)).unwrap(), Some("client_stalled"));
}

/// Sixty requests of one client, of which it reads nothing, are not in the way of another client's one.
#[test]
fn one_clients_requests_do_not_hold_up_another_client() {
    let server = slow(options(), 1);
    let body = long(true).to_string().into_bytes();
    let _unread: Vec<TcpStream> = (0..60).map(|_| server.send("POST", "/v1/completions", "", &body)).collect();
    until("one runs, and the others wait", || server.metric("num_requests_waiting") == 59.0);
    // All of 127.0.0.0/8 is this machine; a socket may choose which of it it is.
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 2], 0)).into()).unwrap();
    socket.connect(&server.address.into()).unwrap();
    let mut other = TcpStream::from(socket);
    other.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let body = json!({ "prompt": "Hi", "max_tokens": 2 }).to_string();
    let length = body.len();
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    other.write_all((head + &body).as_bytes()).unwrap();
    assert_eq!(Response::read(other).status, 200);
    let left = server.metric("num_requests_waiting");
    assert!(left > 50.0, "only {left} of 59 still wait: the other client had to wait for the rest");
}
