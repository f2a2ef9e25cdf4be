//! What `serve` writes to standard error: a line for each request that has ended, and what it waits for when it ends
//! itself.
//!
//! Lines go through a bounded queue to a thread that writes them. Where nobody reads standard error, lines are left
//! out, and counted; no request waits for them.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gemma4c_serve::{Notice, RequestLine, Sink, date_and_time};
use serde_json::{Value, json};

/// How lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
    Off,
}

/// Lines that wait to be written, at most.
const MOST_WAITING: usize = 4096;
/// How long the last lines may take when the server has ended.
const LAST_LINES: Duration = Duration::from_secs(1);

enum Message {
    Line(String),
    End,
}

/// A log that is being written.
pub struct Log {
    sink: Sink,
    lines: SyncSender<Message>,
    written: Receiver<()>,
}

impl Log {
    /// Nothing is written where it is off.
    pub fn start(format: LogFormat, out: impl Write + Send + 'static) -> Option<Log> {
        let write: fn(&Notice, SystemTime) -> String = match format {
            LogFormat::Off => return None,
            LogFormat::Text => text,
            LogFormat::Json => |notice, now| json_line(notice, now).to_string(),
        };
        let (lines, received) = sync_channel(MOST_WAITING);
        let left_out = Arc::new(AtomicU64::new(0));
        let (ended, written) = channel();
        let counted = Arc::clone(&left_out);
        thread::spawn(move || {
            write_all(&received, &counted, out, format);
            _ = ended.send(());
        });
        let queue = lines.clone();
        let sink = Sink::new(move |notice| {
            let line = write(&notice, SystemTime::now());
            if let Err(TrySendError::Full(_)) = queue.try_send(Message::Line(line)) {
                left_out.fetch_add(1, Ordering::Relaxed);
            }
        });
        Some(Log { sink, lines, written })
    }

    pub fn sink(&self) -> Sink {
        self.sink.clone()
    }

    /// Waits a moment for what was not written yet.
    pub fn finish(self) {
        if self.lines.try_send(Message::End).is_ok() {
            _ = self.written.recv_timeout(LAST_LINES);
        }
    }
}

fn write_all(lines: &Receiver<Message>, left_out: &AtomicU64, mut out: impl Write, format: LogFormat) {
    while let Ok(Message::Line(line)) = lines.recv() {
        // A log that cannot be written is no reason to end a server.
        _ = writeln!(out, "{line}");
        let count = left_out.swap(0, Ordering::Relaxed);
        if count > 0 {
            let time = timestamp(SystemTime::now());
            _ = match format {
                LogFormat::Json => {
                    writeln!(out, "{}", json!({ "time": time, "event": "lines_left_out", "lines": count }))
                }
                _ => writeln!(out, "{time} {count} lines were left out: they were not read in time"),
            };
        }
    }
    _ = out.flush();
}

/// A line for a person: what is not known is not there.
fn text(notice: &Notice, now: SystemTime) -> String {
    let seconds = |time: &Duration| time.as_secs();
    match notice {
        Notice::Request(line) => {
            let RequestLine { client, method, status, total, .. } = &**line;
            let path = line.path.escape_debug();
            let mut text = format!("{} {client} {method} {path} {status}", timestamp(line.time));
            let mut more = |name: &str, value: Option<String>| {
                value.iter().for_each(|value| text.push_str(&format!(" {name}={value}")));
            };
            let ms = |time: Duration| format!("{:.1}ms", time.as_secs_f64() * 1e3);
            let quoted = |text: &str| {
                (!text.is_empty()).then(|| match text.contains([' ', '"', '=']) {
                    true => format!("{text:?}"),
                    false => text.escape_debug().to_string(),
                })
            };
            more("model", line.model.as_deref().and_then(quoted));
            more("prompt", line.prompt_tokens.map(|tokens| tokens.to_string()));
            more("cached", line.cached_tokens.map(|tokens| tokens.to_string()));
            more("output", line.output_tokens.map(|tokens| tokens.to_string()));
            more("ttft", line.first_token.map(ms));
            more("total", Some(ms(*total)));
            more("finish", line.finish_reason.clone());
            more("error", line.error.map(String::from));
            more("id", quoted(&line.request_id));
            text
        }
        Notice::Draining { requests, oldest, left } => format!(
            "{} draining: waiting for {}, the oldest for {} s; ends in {} s at the latest, or at once with another signal",
            timestamp(now),
            counted(*requests),
            seconds(oldest),
            seconds(left),
        ),
        Notice::Cut { requests } => format!("{} ending: {} cut", timestamp(now), counted(*requests)),
    }
}

fn counted(requests: usize) -> String {
    format!("{requests} request{}", if requests == 1 { "" } else { "s" })
}

/// The same for a program: names do not change, and every one is always there.
fn json_line(notice: &Notice, now: SystemTime) -> Value {
    let ms = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
    match notice {
        Notice::Request(line) => json!({
            "time": timestamp(line.time),
            "event": "request",
            "client": line.client.to_string(),
            "method": line.method,
            "path": line.path,
            "status": line.status,
            "model": line.model,
            "prompt_tokens": line.prompt_tokens,
            "cached_tokens": line.cached_tokens,
            "output_tokens": line.output_tokens,
            "ttft_ms": line.first_token.map(ms),
            "total_ms": ms(line.total),
            "finish_reason": line.finish_reason,
            "error": line.error,
            "request_id": line.request_id,
        }),
        Notice::Draining { requests, oldest, left } => json!({
            "time": timestamp(now), "event": "draining", "requests": requests, "oldest_ms": ms(*oldest), "left_ms": ms(*left),
        }),
        Notice::Cut { requests } => json!({ "time": timestamp(now), "event": "cut", "requests": requests }),
    }
}

/// UTC, as RFC 3339 writes it, with milliseconds.
fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:03}Z", date_and_time(since.as_secs()), since.subsec_millis())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Mutex;
    use std::sync::mpsc::Sender;

    use super::*;

    fn line() -> RequestLine {
        RequestLine {
            time: UNIX_EPOCH + Duration::from_millis(5_142_896_789),
            client: ([127, 0, 0, 1], 5000).into(),
            method: "POST".into(),
            path: "/v1/chat/completions".into(),
            status: 200,
            model: Some("a model".into()),
            request_id: "req_1".into(),
            prompt_tokens: Some(20),
            cached_tokens: Some(4),
            output_tokens: Some(7),
            queued: Some(Duration::from_micros(1_000)),
            first_token: Some(Duration::from_micros(12_340)),
            total: Duration::from_micros(99_990),
            finish_reason: Some("stop".into()),
            error: None,
            traceparent: None,
        }
    }

    #[test]
    fn a_line_says_what_is_known() {
        let now = UNIX_EPOCH;
        let whole = text(&Notice::Request(Box::new(line())), now);
        insta::assert_snapshot!(whole, @r#"1970-03-01T12:34:56.789Z 127.0.0.1:5000 POST /v1/chat/completions 200 model="a model" prompt=20 cached=4 output=7 ttft=12.3ms total=100.0ms finish=stop id=req_1"#);
        insta::assert_snapshot!(json_line(&Notice::Request(Box::new(line())), now), @r#"{"time":"1970-03-01T12:34:56.789Z","event":"request","client":"127.0.0.1:5000","method":"POST","path":"/v1/chat/completions","status":200,"model":"a model","prompt_tokens":20,"cached_tokens":4,"output_tokens":7,"ttft_ms":12.34,"total_ms":99.99,"finish_reason":"stop","error":null,"request_id":"req_1"}"#);
        let none = RequestLine {
            prompt_tokens: None,
            cached_tokens: None,
            output_tokens: None,
            first_token: None,
            finish_reason: None,
            error: Some("client_gone"),
            request_id: "a\nb".into(),
            ..line()
        };
        insta::assert_snapshot!(text(&Notice::Request(Box::new(none)), now), @r#"1970-03-01T12:34:56.789Z 127.0.0.1:5000 POST /v1/chat/completions 200 model="a model" total=100.0ms error=client_gone id=a\nb"#);
        let draining =
            Notice::Draining { requests: 3, oldest: Duration::from_secs(12), left: Duration::from_millis(27_500) };
        insta::assert_snapshot!(text(&draining, now), @"1970-01-01T00:00:00.000Z draining: waiting for 3 requests, the oldest for 12 s; ends in 27 s at the latest, or at once with another signal");
        insta::assert_snapshot!(json_line(&draining, now), @r#"{"time":"1970-01-01T00:00:00.000Z","event":"draining","requests":3,"oldest_ms":12000.0,"left_ms":27500.0}"#);
        insta::assert_snapshot!(text(&Notice::Cut { requests: 1 }, now), @"1970-01-01T00:00:00.000Z ending: 1 request cut");
    }

    /// Writes nothing before it may.
    struct Stuck {
        may_write: Receiver<()>,
        has_begun: Sender<()>,
        text: Arc<Mutex<Vec<u8>>>,
        is_free: bool,
    }

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if !self.is_free {
                _ = self.has_begun.send(());
                _ = self.may_write.recv();
                self.is_free = true;
            }
            self.text.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// As standard error is, where nobody reads the pipe that it is.
    #[test]
    fn a_log_that_nobody_reads_keeps_nobody_waiting() {
        let (free, may_write) = channel();
        let (has_begun, begun) = channel();
        let text: Arc<Mutex<Vec<u8>>> = Arc::default();
        let out = Stuck { may_write, has_begun, text: Arc::clone(&text), is_free: false };
        let log = Log::start(LogFormat::Text, out).unwrap();
        let sink = log.sink();
        sink.tell(Notice::Request(Box::new(line())));
        begun.recv().unwrap();
        // One is being written, as many as there is room for wait, and the rest is left out.
        (0..MOST_WAITING + 10).for_each(|_| sink.tell(Notice::Request(Box::new(line()))));
        free.send(()).unwrap();
        loop {
            let text = String::from_utf8(text.lock().unwrap().clone()).unwrap();
            if text.lines().count() == MOST_WAITING + 2 {
                assert!(text.contains(" 10 lines were left out: they were not read in time\n"), "{text}");
                break;
            }
            thread::yield_now();
        }
        log.finish();
        assert!(Log::start(LogFormat::Off, io::sink()).is_none());
    }
}
