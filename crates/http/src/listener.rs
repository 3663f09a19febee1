//! A socket that takes so many connections at a time: others wait in the kernel, and the host keeps its open files.

use axum::serve::Listener;
use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::{SocketAddr, UCred};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub struct Bounded {
    listener: UnixListener,
    places: Arc<Semaphore>,
}

/// A connection, and its place.
pub struct Placed {
    stream: UnixStream,
    _place: OwnedSemaphorePermit,
}

impl Bounded {
    pub fn new(listener: UnixListener, connections_max: usize) -> Bounded {
        Bounded { listener, places: Arc::new(Semaphore::new(connections_max)) }
    }
}

impl Placed {
    /// Who is at its other end.
    pub fn peer(&self) -> Result<UCred> {
        self.stream.peer_cred()
    }
}

impl Listener for Bounded {
    type Io = Placed;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Placed, SocketAddr) {
        let place = Arc::clone(&self.places).acquire_owned().await.expect("it is never closed");
        let (stream, address) = Listener::accept(&mut self.listener).await;
        (Placed { stream, _place: place }, address)
    }

    fn local_addr(&self) -> Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl AsyncRead for Placed {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for Placed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
