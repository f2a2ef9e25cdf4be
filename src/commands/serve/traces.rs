//! Spans of the requests that a server has answered, for a collector of OpenTelemetry: one for each request, and below it
//! one for its wait, one for its prompt and one for its answer.
//!
//! Spans are made from what the log is made from, when a request has ended, and go out in batches as OTLP over HTTP in
//! JSON. They hold numbers and names, never texts. A collector that is slow or away costs no request anything: spans are
//! left out, and counted.

use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use gemma4c_runtime::any_seed;
use gemma4c_serve::RequestLine;
use serde_json::{Value, json};
use ureq::Agent;

/// Requests whose spans wait to be sent, at most.
const MOST_WAITING: usize = 4096;
/// Requests of one batch.
const MOST_TOGETHER: usize = 256;
/// How long the first request of a batch waits for others.
const GATHERED: Duration = Duration::from_secs(1);
/// How long a collector may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the last spans may take when the server has ended.
const LAST_SPANS: Duration = Duration::from_secs(3);

/// Where spans go.
#[derive(Clone, Debug, PartialEq)]
pub struct Collector {
    address: String,
    headers: Vec<(String, String)>,
    service: String,
}

impl Collector {
    /// As an option says, or else OpenTelemetry's own variables; `None` where nobody says.
    pub fn find(option: Option<&str>) -> Result<Option<Collector>> {
        Collector::of(option, |name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn of(option: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Collector>> {
        let below = |base: &str| format!("{}/v1/traces", base.trim_end_matches('/'));
        let address = option
            .map(below)
            .or_else(|| variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
            .or_else(|| variable("OTEL_EXPORTER_OTLP_ENDPOINT").map(|base| below(&base)));
        let Some(address) = address else { return Ok(None) };
        if !["http://", "https://"].iter().any(|scheme| address.starts_with(scheme)) {
            bail!("the collector's address {address:?} does not begin with http:// or https://");
        }
        let mut headers = Vec::new();
        for pair in variable("OTEL_EXPORTER_OTLP_HEADERS").iter().flat_map(|all| all.split(',')) {
            let (name, value) = pair
                .split_once('=')
                .with_context(|| format!("OTEL_EXPORTER_OTLP_HEADERS has {pair:?}, which is no NAME=VALUE"))?;
            headers.push((name.trim().to_owned(), value.trim().to_owned()));
        }
        let service = variable("OTEL_SERVICE_NAME").unwrap_or_else(|| "gemma4c".into());
        Ok(Some(Collector { address, headers, service }))
    }

    fn send(&self, agent: &Agent, spans: Vec<Value>) -> Result<(), ureq::Error> {
        let attributes = attributes(&[
            ("service.name", self.service.as_str().into()),
            ("service.version", env!("CARGO_PKG_VERSION").into()),
        ]);
        let body = json!({ "resourceSpans": [{
            "resource": { "attributes": attributes },
            "scopeSpans": [{ "scope": { "name": "gemma4c" }, "spans": spans }],
        }] });
        let mut request = agent.post(&self.address).header("content-type", "application/json");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        request.send(body.to_string()).map(|_| ())
    }
}

enum Message {
    Ended(Box<RequestLine>),
    End,
}

/// Spans that are being sent.
pub struct Traces {
    requests: SyncSender<Message>,
    left_out: Arc<AtomicU64>,
    sent: Receiver<()>,
}

impl Traces {
    pub fn start(collector: Collector) -> Traces {
        let (requests, received) = sync_channel(MOST_WAITING);
        let (ended, sent) = channel();
        let left_out = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&left_out);
        thread::spawn(move || {
            send_all(&collector, &received, &counted);
            _ = ended.send(());
        });
        Traces { requests, left_out, sent }
    }

    /// What is to be told of each request that has ended. It never waits.
    pub fn teller(&self) -> impl Fn(&RequestLine) + Send + Sync + 'static {
        let (requests, left_out) = (self.requests.clone(), Arc::clone(&self.left_out));
        move |line| {
            if let Err(TrySendError::Full(_)) = requests.try_send(Message::Ended(Box::new(line.clone()))) {
                left_out.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Waits a moment for what was not sent yet.
    pub fn finish(self) {
        if self.requests.try_send(Message::End).is_ok() {
            _ = self.sent.recv_timeout(LAST_SPANS);
        }
    }
}

fn send_all(collector: &Collector, requests: &Receiver<Message>, left_out: &AtomicU64) {
    let agent: Agent = Agent::config_builder().timeout_global(Some(PATIENCE)).build().into();
    let mut is_failing = false;
    let mut is_last = false;
    while let (false, Ok(Message::Ended(first))) = (is_last, requests.recv()) {
        let mut lines = vec![first];
        let until = Instant::now() + GATHERED;
        while lines.len() < MOST_TOGETHER {
            match requests.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Message::Ended(line)) => lines.push(line),
                Err(RecvTimeoutError::Timeout) => break,
                Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => {
                    is_last = true;
                    break;
                }
            }
        }
        let spans: Vec<Value> = lines.iter().flat_map(|line| spans(line)).collect();
        if spans.is_empty() {
            continue;
        }
        match collector.send(&agent, spans) {
            Ok(()) => {
                let count = left_out.swap(0, Ordering::Relaxed);
                if count > 0 {
                    eprintln!("[{} takes spans again; those of {count} requests were left out]", collector.address);
                }
                is_failing = false;
            }
            Err(error) => {
                left_out.fetch_add(lines.len() as u64, Ordering::Relaxed);
                if !std::mem::replace(&mut is_failing, true) {
                    eprintln!("[spans are left out: {} does not take them: {error}]", collector.address);
                }
            }
        }
    }
}

/// The trace that a request belongs to, and the span there that has made it.
struct Parent<'a> {
    trace: &'a str,
    span: &'a str,
    is_sampled: bool,
}

/// `00-TRACE-SPAN-FLAGS`; what is anything else is no parent.
fn parent(header: &str) -> Option<Parent<'_>> {
    let mut parts = header.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str, digits: usize| {
        text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_id = |text: &str, digits| is_hex(text, digits) && text.bytes().any(|byte| byte != b'0');
    let is_right = is_hex(version, 2) && version != "ff" && is_id(trace, 32) && is_id(span, 16) && is_hex(flags, 2);
    let flags = u8::from_str_radix(flags, 16).ok().filter(|_| is_right)?;
    Some(Parent { trace, span, is_sampled: flags & 1 == 1 })
}

/// The spans of a request; none where whoever made it keeps none of its own.
fn spans(line: &RequestLine) -> Vec<Value> {
    let parent = line.traceparent.as_deref().and_then(parent);
    if parent.as_ref().is_some_and(|parent| !parent.is_sampled) {
        return Vec::new();
    }
    let trace = parent.as_ref().map_or_else(|| format!("{:016x}{:016x}", any_id(), any_id()), |p| p.trace.to_owned());
    let id = format!("{:016x}", any_id());
    let began = line.time - line.total;
    let nanoseconds =
        |after: Duration| (began + after).duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string();
    let mut known = vec![
        ("http.request.method", line.method.as_str().into()),
        ("url.path", line.path.as_str().into()),
        ("http.response.status_code", line.status.into()),
        ("client.address", line.client.ip().to_string().into()),
        ("gemma4c.request_id", line.request_id.as_str().into()),
    ];
    if let (Some(model), Some(tokens)) = (&line.model, line.prompt_tokens) {
        known.push(("gen_ai.request.model", model.as_str().into()));
        known.push(("gen_ai.usage.input_tokens", tokens.into()));
    }
    known.extend(line.cached_tokens.map(|tokens| ("gen_ai.usage.cache_read.input_tokens", tokens.into())));
    known.extend(line.output_tokens.map(|tokens| ("gen_ai.usage.output_tokens", tokens.into())));
    known.extend(
        line.finish_reason
            .as_ref()
            .map(|reasons| ("gen_ai.response.finish_reasons", reasons.split(',').collect::<Value>())),
    );
    known.extend(line.error.map(|error| ("error.type", error.into())));
    let status = if line.error.is_some() { json!({ "code": 2, "message": line.error }) } else { json!({}) };
    let whole = json!({
        "traceId": trace,
        "spanId": id,
        "parentSpanId": parent.map_or("", |parent| parent.span),
        "name": format!("{} {}", line.method, line.path),
        // Of a server.
        "kind": 2,
        "startTimeUnixNano": nanoseconds(Duration::ZERO),
        "endTimeUnixNano": nanoseconds(line.total),
        "attributes": attributes(&known),
        "status": status,
    });
    let part = |name: &str, from: Option<Duration>, to: Option<Duration>| {
        let (from, to) = (from?, to?);
        Some(json!({
            "traceId": trace,
            "spanId": format!("{:016x}", any_id()),
            "parentSpanId": id,
            "name": name,
            // Within the server.
            "kind": 1,
            "startTimeUnixNano": nanoseconds(from),
            "endTimeUnixNano": nanoseconds(to),
        }))
    };
    let parts = [
        part("queue", Some(Duration::ZERO), line.queued),
        part("prefill", line.queued, line.first_token),
        part("decode", line.first_token, Some(line.total)),
    ];
    [whole].into_iter().chain(parts.into_iter().flatten()).collect()
}

/// No id is zero.
fn any_id() -> u64 {
    any_seed().max(1)
}

fn attributes(known: &[(&str, Value)]) -> Value {
    let typed = |value: &Value| match value {
        Value::Number(number) => json!({ "intValue": number.to_string() }),
        Value::Array(list) => {
            let values: Vec<Value> = list.iter().map(|text| json!({ "stringValue": text })).collect();
            json!({ "arrayValue": { "values": values } })
        }
        text => json!({ "stringValue": text }),
    };
    known.iter().map(|(key, value)| json!({ "key": key, "value": typed(value) })).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    fn line() -> RequestLine {
        RequestLine {
            time: UNIX_EPOCH + Duration::from_secs(5_142_896),
            client: ([127, 0, 0, 1], 5000).into(),
            method: "POST".into(),
            path: "/v1/chat/completions".into(),
            status: 200,
            model: Some("a model".into()),
            request_id: "req_1".into(),
            prompt_tokens: Some(20),
            cached_tokens: Some(4),
            output_tokens: Some(7),
            queued: Some(Duration::from_millis(1)),
            first_token: Some(Duration::from_millis(12)),
            total: Duration::from_millis(100),
            finish_reason: Some("stop,length".into()),
            error: None,
            traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
        }
    }

    #[test]
    fn a_request_is_a_span_with_its_parts_below_it() {
        let all = spans(&line());
        let named: Vec<&Value> = all.iter().map(|span| &span["name"]).collect();
        assert_eq!(named, ["POST /v1/chat/completions", "queue", "prefill", "decode"]);
        assert!(all.iter().all(|span| span["traceId"] == "0af7651916cd43dd8448eb211c80319c"));
        assert_eq!(all[0]["parentSpanId"], "b7ad6b7169203331");
        assert!(all[1..].iter().all(|span| span["parentSpanId"] == all[0]["spanId"]));
        let times = |span: &Value| [span["startTimeUnixNano"].clone(), span["endTimeUnixNano"].clone()];
        assert_eq!(times(&all[0]), ["5142895900000000", "5142896000000000"]);
        assert_eq!(times(&all[2]), ["5142895901000000", "5142895912000000"]);
        let attribute = |key: &str| {
            let known = all[0]["attributes"].as_array().expect("a list").iter();
            known.clone().find(|known| known["key"] == key).map(|known| known["value"].clone())
        };
        assert_eq!(attribute("gen_ai.usage.output_tokens"), Some(json!({ "intValue": "7" })));
        let reasons = json!({ "arrayValue": { "values": [{ "stringValue": "stop" }, { "stringValue": "length" }] } });
        assert_eq!(attribute("gen_ai.response.finish_reasons"), Some(reasons));
        assert_eq!(all[0]["status"], json!({}));

        let failed = RequestLine { error: Some("deadline"), first_token: None, ..line() };
        let all = spans(&failed);
        assert_eq!((all.len(), &all[0]["status"]["code"]), (2, &json!(2)));
    }

    #[test]
    fn only_a_right_header_is_a_parent() {
        let count = |header: &str| spans(&RequestLine { traceparent: Some(header.into()), ..line() });
        let trace = "0af7651916cd43dd8448eb211c80319c";
        assert_eq!(count(&format!("00-{trace}-b7ad6b7169203331-00")), Vec::<Value>::new(), "nobody wants it");
        for wrong in ["", "00", "00-0-0-01", "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "ä-ä-ä-ä"] {
            let all = count(wrong);
            assert_eq!((all.len(), &all[0]["parentSpanId"]), (4, &json!("")), "{wrong}");
        }
        let zero = format!("00-{}-b7ad6b7169203331-01", "0".repeat(32));
        assert_ne!(count(&zero)[0]["traceId"], "0".repeat(32));
    }

    #[test]
    fn the_collector_is_the_one_that_was_named() {
        let none = |_: &str| None;
        assert_eq!(Collector::of(None, none).expect("nobody is no error"), None);
        let with = |option: Option<&str>, variables: &[(&str, &str)]| {
            let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| v.to_string());
            Collector::of(option, variable).map(|collector| collector.map(|collector| collector.address))
        };
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://one:4318/");
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://two/in");
        let address = |option, variables: &[_]| with(option, variables).expect("an address").expect("one");
        assert_eq!(address(None, &[base]), "http://one:4318/v1/traces");
        assert_eq!(address(None, &[base, own]), "https://two/in");
        assert_eq!(address(Some("http://three"), &[base, own]), "http://three/v1/traces");
        assert!(with(Some("three:4317"), &[]).unwrap_err().to_string().contains("\"three:4317/v1/traces\""));
        let wrong = with(Some("http://a"), &[("OTEL_EXPORTER_OTLP_HEADERS", "a=b,c")]);
        assert!(wrong.unwrap_err().to_string().contains("\"c\""));
    }

    /// Spans arrive at a collector; one that is away costs nothing but them.
    #[test]
    fn spans_go_to_their_collector() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}/v1/traces", listener.local_addr().expect("an address"));
        let headers = vec![("x-key".to_owned(), "ours".to_owned())];
        let traces = Traces::start(Collector { address, headers, service: "mine".into() });
        let collected = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut received = Vec::new();
            let mut buffer = [0; 4096];
            let body = loop {
                let count = stream.read(&mut buffer).expect("a request");
                received.extend(&buffer[..count]);
                let text = String::from_utf8_lossy(&received).into_owned();
                let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                let head = head.to_lowercase();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
                if body.len() == length.parse::<usize>().expect("a number") {
                    assert!(head.starts_with("post /v1/traces ") && head.contains("x-key: ours"), "{head}");
                    break body.to_owned();
                }
            };
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").expect("an answer");
            serde_json::from_str::<Value>(&body).expect("JSON")
        });
        let tell = traces.teller();
        tell(&line());
        tell(&line());
        traces.finish();
        let body = collected.join().expect("a collector");
        let spans = body.pointer("/resourceSpans/0/scopeSpans/0/spans").and_then(Value::as_array).expect("spans");
        assert_eq!(spans.len(), 8);
        let service = body.pointer("/resourceSpans/0/resource/attributes/0/value/stringValue");
        assert_eq!(service, Some(&json!("mine")));
    }
}
