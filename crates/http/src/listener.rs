//! Connections: so many at a time, each with who is at its other end; others wait in the kernel, and the host keeps its
//! open files. HTTP/1.1 alone.

use crate::door::Peer;
use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::io::Result;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tower::ServiceExt;

/// Of a socket.
const CONNECTIONS_MAX: usize = 256;

/// Of a client that comes over TLS.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// A request's head, from when the one before was answered.
const HEAD_WITHIN: Duration = Duration::from_secs(60);

/// Where nothing can be accepted: files are short, maybe.
const PAUSE: Duration = Duration::from_millis(200);

struct Places(Arc<Semaphore>);

impl Places {
    fn new() -> Places {
        Places(Arc::new(Semaphore::new(CONNECTIONS_MAX)))
    }

    /// A place, and the next connection for it.
    async fn next<S, A, F>(&self, accept: impl Fn() -> F) -> (OwnedSemaphorePermit, S)
    where
        F: Future<Output = Result<(S, A)>>,
    {
        let place = Arc::clone(&self.0).acquire_owned().await.expect("it is never closed");
        loop {
            match accept().await {
                Ok((stream, _)) => return (place, stream),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }
}

/// Serves a socket of this machine for as long as it is polled.
pub async fn serve_unix(listener: UnixListener, router: Router) {
    let places = Places::new();
    loop {
        let (place, stream) = places.next(|| listener.accept()).await;
        let (router, peer) = (router.clone(), Peer::of_unix(&stream));
        tokio::spawn(async move {
            converse(stream, peer, router).await;
            drop(place);
        });
    }
}

/// Serves a port over TLS for as long as it is polled; each connection by what `config` gives then.
pub async fn serve_tls(
    listener: TcpListener,
    config: impl Fn() -> Arc<ServerConfig> + Send + Sync + 'static,
    router: Router,
) {
    let places = Places::new();
    loop {
        let (place, stream) = places.next(|| listener.accept()).await;
        let (router, acceptor) = (router.clone(), TlsAcceptor::from(config()));
        tokio::spawn(async move {
            // Answers are small, and not to wait for more.
            let _ = stream.set_nodelay(true);
            if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_WITHIN, acceptor.accept(stream)).await {
                let shown = stream.get_ref().1.peer_certificates();
                let peer = Peer::of_tls(shown.and_then(|chain| chain.first()).map(|leaf| leaf.as_ref()));
                converse(stream, peer, router).await;
            }
            drop(place);
        });
    }
}

/// Serves a port that only this machine has for as long as it is polled; `router` asks nobody who is there.
pub async fn serve_local(listener: TcpListener, router: Router) {
    let places = Places::new();
    loop {
        let (place, stream) = places.next(|| listener.accept()).await;
        let router = router.clone();
        tokio::spawn(async move {
            let _ = stream.set_nodelay(true);
            converse(stream, Peer::of_tls(None), router).await;
            drop(place);
        });
    }
}

/// Until either end has enough.
async fn converse<S>(stream: S, peer: Peer, router: Router)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(peer.clone()));
        router.clone().oneshot(request)
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN);
    // What a client breaks off, or says that is no HTTP, is its own affair.
    let _ = http.serve_connection(TokioIo::new(stream), service).await;
}
