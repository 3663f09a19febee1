//! The HTTP interface, on a thread of its own: it asks the control plane as the control sockets do.
//!
//! `api.sock` is there from the beginning. Over the network it is served where `api.tcp` says so; where that can't be, the
//! host goes on, tries again, and says so in its log.

use super::control::ControlPlane;
use super::tls::load_api_and_follow;
use crate::capacity::account;
use crate::grid::certs::now_s;
use crate::{logger, overview};
use anyhow::{Context, Result, anyhow};
use holdfast_api::{Capacity, Code, Error, GridStatus, Health, Request, Response, Role};
use holdfast_base::GridId;
use holdfast_http::metrics::Survey;
use holdfast_http::{Ask, Caller, Config, Limits, Router, Shown, router, serve_tls, serve_unix};
use holdfast_runtime::bearer::Bearer;
use holdfast_runtime::pki::{self, Identity, identity_of};
use holdfast_runtime::tls::TlsServer;
use holdfast_verdict::findings;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

/// Between attempts to listen at `api.tcp`.
const LISTEN_PACE: Duration = Duration::from_secs(5);

/// What a thread has allocated for a large answer goes back to the system when the thread ends.
const THREAD_RESTS: Duration = Duration::from_millis(100);

struct Plane(Arc<ControlPlane>);

impl Ask for Plane {
    fn ask(&self, role: Role, request: Request) -> Response {
        self.0.asked(role, request)
    }

    fn health(&self) -> Result<Health, Error> {
        health(&self.0).map_err(|error| Error::new(Code::Failed, format!("{error:#}")))
    }

    fn capacity(&self) -> Result<Capacity, Error> {
        capacity(&self.0).map_err(|error| Error::new(Code::Failed, format!("{error:#}")))
    }

    fn survey(&self) -> Option<&dyn Survey> {
        Some(&*self.0)
    }

    fn caller_of(&self, shown: Shown<'_>) -> Result<Caller, Error> {
        let (identity, issued_s) = match shown {
            Shown::Certificate(der) => {
                let nobody =
                    || refused("the certificate names nobody: `holdfast grid tls operator` makes one that does");
                (identity_of(der).ok_or_else(nobody)?, pki::issued_s(der).unwrap_or(0))
            }
            Shown::Token(text) => {
                let bearer =
                    self.bearer(text).map_err(|error| refused(&format!("the token is not taken: {error:#}")))?;
                (bearer.identity, bearer.issued_s)
            }
        };
        let revocations = &self.0.revocations;
        // Each request asks, and each listener every second: the list is not copied for it.
        let revoked = revocations.lists.first().map(|list| list.covers_issued(&identity, issued_s));
        let role = role_of(&identity, revocations.certificates.grid(), revoked)?;
        Ok(Caller::new(role, &identity.role.to_string()))
    }
}

impl Plane {
    fn bearer(&self, text: &str) -> Result<Bearer> {
        let certificates = &self.0.revocations.certificates;
        Ok(Bearer::verify(text, certificates.grid(), &certificates.ca_pem()?, now_s())?)
    }
}

/// The grid as this host has it, and what is not well.
pub(super) fn health(plane: &ControlPlane) -> Result<Health> {
    let status = status(plane)?;
    Ok(Health { findings: findings::of(&status), status })
}

/// Devices as nodes told of them last, and what hosts say of their volumes.
fn capacity(plane: &ControlPlane) -> Result<Capacity> {
    let status = status(plane)?;
    match plane.asked(Role::Admin, Request::GridSpace) {
        Response::Space { volumes, silent } => Ok(account(&status, volumes, silent)),
        Response::Error { message, .. } => Err(anyhow!(message)),
        other => Err(anyhow!("the host answers {other:?}")),
    }
}

fn status(plane: &ControlPlane) -> Result<GridStatus> {
    let tell = || match plane.asked(Role::Admin, Request::Status) {
        Response::Status(status) => Ok(*status),
        Response::Error { message, .. } => Err(anyhow!(message)),
        other => Err(anyhow!("the host answers {other:?}")),
    };
    overview::gather_as(&plane.dir, tell)
}

fn refused(why: &str) -> Error {
    Error::new(Code::NotPermitted, why)
}

/// `revoked`: what it was given, where the grid has a list of that.
fn role_of(identity: &Identity, grid: GridId, revoked: Option<bool>) -> Result<Role, Error> {
    let who = &identity.role;
    if identity.grid != grid {
        return Err(refused("that is of another grid"));
    }
    let role = match who {
        pki::Role::Operator(_) => Role::Admin,
        pki::Role::Reader(_) => Role::Reader,
        pki::Role::Host(_) | pki::Role::Node(_) | pki::Role::Client(_) => {
            return Err(refused(&format!("{who} has no access here: `holdfast grid tls operator` gives it")));
        }
    };
    match revoked {
        Some(false) => Ok(role),
        Some(true) => {
            Err(refused(&format!("what {who} was given is revoked; `holdfast grid tls operator` makes another")))
        }
        None => Err(refused("this grid has no authority that somebody could be known by")),
    }
}

/// Serves the socket, and the port that the settings name, from a thread of its own: so many connections of each.
pub(super) fn start(plane: &Arc<ControlPlane>, listener: UnixListener, connections_max: usize) -> Result<()> {
    listener.set_nonblocking(true)?;
    let config = Config::default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(config.at_a_time)
        .thread_keep_alive(THREAD_RESTS)
        .thread_name("http-request")
        .build()
        .context("cannot begin the HTTP interface")?;
    let limits = Limits { connections: connections_max, ..Limits::default() };
    let router = router(Arc::new(Plane(Arc::clone(plane))), config);
    let settings = &plane.settings;
    let remote = settings.api_tcp.zip(settings.api_tls_dir.clone());
    let remote =
        remote.map(|(address, dir)| (address, load_api_and_follow(&dir, &plane.revocations.certificates.ca())));
    let serve = move || {
        runtime.block_on(async {
            let listener = match tokio::net::UnixListener::from_std(listener) {
                Ok(listener) => listener,
                Err(error) => return logger::error(format_args!("the HTTP interface can't be served: {error}")),
            };
            match remote {
                Some((address, Ok(tls))) => drop(tokio::spawn(serve_remote(address, tls, router.clone(), limits))),
                Some((address, Err(error))) => {
                    logger::error(format_args!("HTTP is not served on {address}, as api.tcp asks for: {error:#}"));
                }
                None => {}
            }
            serve_unix(listener, router, limits).await;
        });
    };
    std::thread::Builder::new().name("http".to_string()).spawn(serve)?;
    Ok(())
}

async fn serve_remote(address: SocketAddr, tls: TlsServer, router: Router, limits: Limits) {
    let mut is_told = false;
    let listener = loop {
        match tokio::net::TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) if !is_told => {
                is_told = true;
                logger::error(format_args!(
                    "HTTP is not served on {address} yet, as api.tcp asks for: {error}; it is tried again"
                ));
            }
            Err(_) => {}
        }
        tokio::time::sleep(LISTEN_PACE).await;
    };
    logger::info(format_args!("HTTP is served on {address}, with TLS"));
    serve_tls(listener, move || tls.config(), router, limits).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_runtime::revoked::{Revoked, RevokedNow};

    #[test]
    fn operators_and_readers_of_this_grid_are_let_in_while_nothing_is_revoked() {
        let grid = GridId(7);
        let of = |grid, role| Identity { grid, role };
        let (ann, bob) = (of(grid, pki::Role::Operator("ann".into())), of(grid, pki::Role::Reader("bob".into())));
        let mut list = Revoked::none(grid);
        let at = |who: &Identity, issued_s, list: Option<&Revoked>| {
            let now = RevokedNow::new(grid);
            let revoked = list.map(|list| (now.replace(list), now.covers_issued(who, issued_s)).1);
            role_of(who, grid, revoked)
        };
        let judge = |who: &Identity, list: Option<&Revoked>| at(who, 100, list);
        assert_eq!((judge(&ann, Some(&list)), judge(&bob, Some(&list))), (Ok(Role::Admin), Ok(Role::Reader)));
        assert!(judge(&ann, None).is_err(), "without a list nothing is known to be good");
        for other in [
            of(GridId(8), pki::Role::Operator("ann".into())),
            of(grid, pki::Role::Host("a".into())),
            of(grid, pki::Role::Client("ann".into())),
        ] {
            let error = judge(&other, Some(&list)).unwrap_err();
            assert_eq!(error.code, Code::NotPermitted, "{other}");
        }
        list.add(pki::Role::Operator("ann".into()), 100);
        assert!(judge(&ann, Some(&list)).unwrap_err().message.contains("revoked"));
        assert_eq!(at(&ann, 101, Some(&list)), Ok(Role::Admin), "what is issued later is good");
    }
}
