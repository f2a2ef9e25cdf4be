//! Connections: where the server listens, and how long it puts up with a client that does not read, or is not there any
//! more.
//!
//! A client that has closed its side of a connection may be waiting for its answer, or be gone: TCP tells the two apart
//! only when it is sent something. So it is sent the first byte of its answer, which every answer begins with. One that
//! is gone answers with a reset, and its request ends.

use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep, timeout};

use crate::models::Models;
use crate::record::{Client, Notice, RequestLine, Sink};

/// A connection may take so long to send the head of a request.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Connections at once, at most: each takes a file descriptor and a few kilobytes.
const MOST_CONNECTIONS: usize = 8192;
/// Bytes that the system takes from us while the client takes none from it. The less, the sooner a client that does not
/// read is noticed.
const MOST_UNSENT: u32 = 16 << 10;
/// How often it is looked again at what no event tells.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Ports that are tried where one must be free at several addresses.
const MOST_PORTS: usize = 16;

/// How long a client may read nothing of what it is sent.
#[derive(Clone, Copy, Debug)]
pub struct Stall {
    /// While other requests wait for their turn.
    pub contended: Duration,
    /// While none does.
    pub at_most: Duration,
}

/// Listens at all addresses of a host: one that this machine does not have is left out, unless all are.
pub async fn listen(host: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    let mut addresses: Vec<SocketAddr> = lookup_host((host, port)).await?.collect();
    addresses.sort_by_key(|address| (address.is_ipv6(), *address));
    addresses.dedup();
    let mut tries = if port == 0 { MOST_PORTS } else { 1 };
    loop {
        tries -= 1;
        match listen_at(&addresses).await {
            // The port that was free at one address is taken at another.
            Err(error) if error.kind() == ErrorKind::AddrInUse && tries > 0 => continue,
            done => return done,
        }
    }
}

async fn listen_at(addresses: &[SocketAddr]) -> io::Result<Vec<TcpListener>> {
    let mut listeners: Vec<TcpListener> = Vec::new();
    let mut refused = io::Error::from(ErrorKind::NotFound);
    for address in addresses {
        let mut address = *address;
        if let Some(first) = listeners.first() {
            address.set_port(first.local_addr()?.port());
        }
        match TcpListener::bind(address).await {
            Ok(listener) => listeners.push(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => return Err(error),
            Err(error) => refused = error,
        }
    }
    if listeners.is_empty() { Err(refused) } else { Ok(listeners) }
}

/// What all connections of a server have in common.
#[derive(Clone)]
pub struct Connections {
    pub router: Router,
    pub models: Arc<Models>,
    pub stall: Stall,
    pub sink: Option<Sink>,
    /// Says that the server ends.
    pub closed: watch::Receiver<bool>,
}

impl Connections {
    /// Takes connections until it is dropped.
    pub async fn accept(self, listeners: Vec<TcpListener>) {
        let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        let mut accepting = tokio::task::JoinSet::new();
        for listener in listeners {
            accepting.spawn(self.clone().accept_at(listener, Arc::clone(&room)));
        }
        while accepting.join_next().await.is_some() {}
    }

    async fn accept_at(self, listener: TcpListener, room: Arc<Semaphore>) {
        loop {
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, address)) => {
                    let this = self.clone();
                    tokio::spawn(async move {
                        this.serve(stream, address).await;
                        drop(permit);
                    });
                }
                // Too many files are open: some will be closed.
                Err(_) => tokio::time::sleep(LOOK_AGAIN).await,
            }
        }
    }

    async fn serve(self, stream: TcpStream, address: SocketAddr) {
        // Tokens are small: none waits for the next to fill a packet.
        _ = stream.set_nodelay(true);
        #[cfg(any(target_os = "linux", target_os = "android"))]
        {
            _ = SockRef::from(&stream).set_tcp_notsent_lowat(MOST_UNSENT);
        }
        let Connections { router, models, stall, sink, mut closed } = self;
        let client = Arc::new(Client { address, has_stalled: AtomicBool::new(false) });
        let line = Arc::new(Line {
            stream,
            is_answering: AtomicBool::new(false),
            is_flushed: AtomicBool::new(true),
            has_begun: AtomicBool::new(false),
        });
        let wire = Wire { line: Arc::clone(&line), client: Arc::clone(&client), models, limits: stall, stalled: None };
        let router = TowerToHyperService::new(router);
        let service = service_fn(|mut request: hyper::Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(Arc::clone(&client));
            let answering = Answering::begin(&line);
            let answered = router.call(request);
            async move {
                let answer = answered.await;
                drop(answering);
                answer
            }
        });
        let mut builder = http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).half_close(true);
        let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(wire), service));
        let served = async {
            tokio::select! {
                served = connection.as_mut() => served,
                // The guard of what was waited for must not live on.
                () = async { _ = closed.wait_for(|closed| *closed).await.map(|_| ()) } => {
                    connection.as_mut().graceful_shutdown();
                    connection.as_mut().await
                }
            }
        };
        let ended = tokio::select! {
            served = served => served,
            // With the connection go the requests on it.
            () = line.client_is_gone() => Ok(()),
        };
        // What is no request is told too; other errors are the client's, who is not there to hear of them.
        if let (Some(sink), Err(error)) = (sink, ended)
            && error.is_parse()
        {
            sink.tell(Notice::Request(Box::new(refused_head(address, &error))));
        }
    }
}

/// A head that the parser has refused, with the status that it was refused with.
fn refused_head(client: SocketAddr, error: &hyper::Error) -> RequestLine {
    RequestLine {
        time: SystemTime::now(),
        client,
        method: "-".into(),
        path: "-".into(),
        status: if error.is_parse_too_large() { 431 } else { 400 },
        model: None,
        request_id: String::new(),
        prompt_tokens: None,
        cached_tokens: None,
        output_tokens: None,
        queued: None,
        first_token: None,
        total: Duration::ZERO,
        finish_reason: None,
        error: Some("bad_head"),
        traceparent: None,
    }
}

/// A connection, as the one who serves it and the one who watches it see it. Both are parts of one task.
struct Line {
    stream: TcpStream,
    /// A handler works on an answer, of which nothing was written.
    is_answering: AtomicBool,
    /// All that was to be written was.
    is_flushed: AtomicBool,
    /// The answer's first byte was sent before the others.
    has_begun: AtomicBool,
}

/// Every answer begins with it: `HTTP/1.1`.
const FIRST_BYTE: u8 = b'H';

impl Line {
    /// Waits until nobody is at the other end.
    async fn client_is_gone(&self) {
        loop {
            match self.stream.ready(Interest::READABLE | Interest::ERROR).await {
                Ok(ready) if ready.is_error() => return,
                Ok(ready) if ready.is_read_closed() => break,
                // Bytes that nobody has read yet.
                Ok(_) => tokio::time::sleep(LOOK_AGAIN).await,
                Err(_) => return,
            }
        }
        loop {
            self.begin_answer();
            if timeout(LOOK_AGAIN, self.stream.ready(Interest::ERROR)).await.is_ok() {
                return;
            }
        }
    }

    /// Sends the first byte of an answer that is not there yet.
    fn begin_answer(&self) {
        let [is_answering, is_flushed, has_begun] =
            [&self.is_answering, &self.is_flushed, &self.has_begun].map(|flag| flag.load(Ordering::Relaxed));
        if is_answering && is_flushed && !has_begun && matches!(self.stream.try_write(&[FIRST_BYTE]), Ok(1)) {
            self.has_begun.store(true, Ordering::Relaxed);
        }
    }
}

/// Says that a handler works on an answer, while it lives.
struct Answering(Arc<Line>);

impl Answering {
    fn begin(line: &Arc<Line>) -> Answering {
        line.is_answering.store(true, Ordering::Relaxed);
        Answering(Arc::clone(line))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.is_answering.store(false, Ordering::Relaxed);
    }
}

/// A connection's bytes. A write that the client does not let through for too long is an error, with which the
/// connection ends.
struct Wire {
    line: Arc<Line>,
    client: Arc<Client>,
    models: Arc<Models>,
    limits: Stall,
    /// Since when nothing went through, and when that is looked at again.
    stalled: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Wire {
    fn poll_patience(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        let contended = self.limits.contended;
        let begin = || (Instant::now(), Box::pin(tokio::time::sleep(contended)));
        let (since, timer) = self.stalled.get_or_insert_with(begin);
        loop {
            ready!(timer.as_mut().poll(context));
            if self.models.waiting() > 0 || since.elapsed() >= self.limits.at_most {
                self.client.has_stalled.store(true, Ordering::Relaxed);
                return Poll::Ready(io::Error::new(ErrorKind::TimedOut, "the client does not read"));
            }
            timer.as_mut().reset(Instant::now() + LOOK_AGAIN);
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.line.stream.poll_read_ready(context))?;
            match self.line.stream.try_read_buf(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                read => return Poll::Ready(read.map(|_| ())),
            }
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let Some(first) = bytes.first() else { return Poll::Ready(Ok(0)) };
        self.line.is_flushed.store(false, Ordering::Relaxed);
        if self.line.has_begun.swap(false, Ordering::Relaxed) {
            let is_sent = *first == FIRST_BYTE;
            return Poll::Ready(if is_sent { Ok(1) } else { Err(ErrorKind::InvalidData.into()) });
        }
        loop {
            match self.line.stream.poll_write_ready(context) {
                Poll::Pending => return self.poll_patience(context).map(Err),
                Poll::Ready(ready) => ready?,
            }
            match self.line.stream.try_write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                written => {
                    self.stalled = None;
                    return Poll::Ready(written);
                }
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.line.is_flushed.store(true, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&self.line.stream).shutdown(Shutdown::Write))
    }
}
