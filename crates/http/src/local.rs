//! A way in for a browser of this machine, which can't open a unix socket: a port of it leads to the host's socket.
//!
//! Other users of the machine reach the port, too: whoever asks shows the key that was made for it. The host lets through
//! what it lets the user do who serves the port.

use crate::door::{Peer, token};
use crate::serve::refused;
use crate::web;
use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use holdfast_api::Code;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::UnixStream;

type IsKey = Box<dyn Fn(&str) -> bool + Send + Sync>;

struct Way {
    socket: PathBuf,
    is_key: IsKey,
}

/// The dashboard; all else goes to the host whose socket this is, when the key is shown as a bearer token.
pub fn local_router(socket: PathBuf, is_key: impl Fn(&str) -> bool + Send + Sync + 'static) -> Router {
    web::routes().fallback(pass).with_state(Arc::new(Way { socket, is_key: Box::new(is_key) }))
}

async fn pass(State(way): State<Arc<Way>>, mut request: Request) -> Response {
    if !matches!(token(request.headers()), Ok(Some(shown)) if (way.is_key)(shown)) {
        let why = "show the key that `holdfast dashboard` prints: open the address that stands there";
        return refused(StatusCode::UNAUTHORIZED, Code::NotPermitted, why).into_response();
    }
    if let Some(ConnectInfo(peer)) = request.extensions().get::<ConnectInfo<Peer>>() {
        peer.is_known(&Arc::from("the key"));
    }
    let headers = request.headers_mut();
    headers.remove(header::AUTHORIZATION);
    headers.insert(header::HOST, HeaderValue::from_static("host"));
    headers.remove(header::ORIGIN);
    ask(&way, request).await.unwrap_or_else(|why| {
        let why = format!("the host can't be reached at {}: {why}; `holdfast status` says more", way.socket.display());
        refused(StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable, why).into_response()
    })
}

async fn ask(way: &Way, request: Request) -> Result<Response, Box<dyn std::error::Error + Send + Sync>> {
    let stream = UnixStream::connect(&way.socket).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends with its answer, or when nobody wants that any more.
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?.map(Body::new))
}
