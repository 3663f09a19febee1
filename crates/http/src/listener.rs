//! Connections: so many at a time, each with who is at its other end; others wait in the kernel, and the host keeps its
//! open files. HTTP/1.1 alone.
//!
//! A client that is slow holds its own place alone: a handshake, the head of a request and an answer have their times. Where
//! all places are taken, [`Seats`] says whose is the next one's.

use crate::door::{Caller, Peer};
use crate::seats::{Holder, Seat, Seats};
use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::Request;
use futures_util::future::select;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;

use hyper_util::rt::{TokioIo, TokioTimer};
use std::io::Result;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tower::ServiceExt;

/// Bounds of what connections may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of one socket.
    pub connections: usize,
    /// Of a client that comes over TLS.
    pub handshake_within: Duration,
    /// A request's head, from when the one before was answered.
    pub head_within: Duration,
    /// How long a client may take none of an answer.
    pub stalled_within: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 256,
            handshake_within: Duration::from_secs(10),
            head_within: Duration::from_secs(60),
            stalled_within: Duration::from_secs(30),
        }
    }
}

/// Of a request's head: a token has a kilobyte, and certificates are no part of it.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Where nothing can be accepted: files are short, maybe.
const PAUSE: Duration = Duration::from_millis(200);

async fn next<C, F>(accept: impl Fn() -> F) -> C
where
    F: Future<Output = Result<C>>,
{
    loop {
        match accept().await {
            Ok(connection) => return connection,
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Serves a socket of this machine for as long as it is polled.
pub async fn serve_unix(listener: UnixListener, router: Router, limits: Limits) {
    let seats = Seats::new(limits.connections);
    loop {
        let (stream, _) = next(|| listener.accept()).await;
        let (router, caller) = (router.clone(), Caller::of_unix(&stream));
        let seat = seats.take(Holder::Known(Arc::clone(&caller.who))).await;
        tokio::spawn(async move { converse(stream, &Peer::Local(caller), &seat, router, limits).await });
    }
}

/// Serves a port over TLS for as long as it is polled; each connection by what `config` gives then.
pub async fn serve_tls(
    listener: TcpListener,
    config: impl Fn() -> Arc<ServerConfig> + Send + Sync + 'static,
    router: Router,
    limits: Limits,
) {
    let seats = Seats::new(limits.connections);
    loop {
        let (stream, from) = next(|| listener.accept()).await;
        let seat = Arc::new(seats.take(Holder::stranger(from.ip())).await);
        let (router, acceptor) = (router.clone(), TlsAcceptor::from(config()));
        tokio::spawn(async move {
            // Answers are small, and not to wait for more.
            let _ = stream.set_nodelay(true);
            let greets = tokio::time::timeout(limits.handshake_within, acceptor.accept(stream));
            if let Some(Ok(Ok(stream))) = unless_left(&seat, greets).await {
                let shown = stream.get_ref().1.peer_certificates();
                let peer = Peer::of_tls(shown.and_then(|chain| chain.first()).map(|leaf| leaf.as_ref()), &seat);
                converse(stream, &peer, &seat, router, limits).await;
            }
        });
    }
}

/// Serves a port that only this machine has for as long as it is polled; `router` says who is there.
pub async fn serve_local(listener: TcpListener, router: Router) {
    let limits = Limits::default();
    let seats = Seats::new(limits.connections);
    loop {
        let (stream, from) = next(|| listener.accept()).await;
        let seat = Arc::new(seats.take(Holder::stranger(from.ip())).await);
        let router = router.clone();
        tokio::spawn(async move {
            let _ = stream.set_nodelay(true);
            converse(stream, &Peer::of_tls(None, &seat), &seat, router, limits).await;
        });
    }
}

/// What comes of it, while the place is this connection's.
async fn unless_left<T>(seat: &Seat, work: impl Future<Output = T>) -> Option<T> {
    match select(pin!(work), pin!(seat.left())).await {
        futures_util::future::Either::Left((done, _)) => Some(done),
        futures_util::future::Either::Right(_) => None,
    }
}

/// Until either end has enough.
async fn converse<S>(stream: S, peer: &Peer, seat: &Seat, router: Router, limits: Limits)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(peer.clone()));
        let answer = router.clone().oneshot(request);
        async move {
            seat.begins();
            let answer = answer.await;
            seat.rests();
            answer
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head_within).max_buf_size(HEAD_BYTES_MAX);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(limits.stalled_within));
    // What a client breaks off, or says that is no HTTP, is its own affair.
    let _ = unless_left(seat, http.serve_connection(TokioIo::new(Box::pin(stream)), service)).await;
}
