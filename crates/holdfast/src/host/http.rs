//! The HTTP interface, on a thread of its own: it asks the control plane as the control sockets do.

use super::control::ControlPlane;
use crate::logger;
use anyhow::{Context, Result};
use holdfast_api::{Request, Response, Role};
use holdfast_http::metrics::Survey;
use holdfast_http::{Ask, Config, router, serve_unix};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

struct Plane(Arc<ControlPlane>);

impl Ask for Plane {
    fn ask(&self, role: Role, request: Request) -> Response {
        self.0.asked(role, request)
    }

    fn survey(&self) -> Option<&dyn Survey> {
        Some(&*self.0)
    }
}

/// Serves the socket from a thread of its own.
pub(super) fn start(plane: &Arc<ControlPlane>, listener: UnixListener) -> Result<()> {
    listener.set_nonblocking(true)?;
    let config = Config::default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(config.at_a_time)
        .thread_name("http-request")
        .build()
        .context("cannot begin the HTTP interface")?;
    let router = router(Arc::new(Plane(Arc::clone(plane))), config);
    let serve = move || {
        let served =
            runtime.block_on(async { serve_unix(tokio::net::UnixListener::from_std(listener)?, router).await });
        if let Err(error) = served {
            logger::error(format_args!("the HTTP interface has ended: {error}; start the host anew to have it back"));
        }
    };
    std::thread::Builder::new().name("http".to_string()).spawn(serve)?;
    Ok(())
}
