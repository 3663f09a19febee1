//! The command line at a machine that is not the grid's: what it asks a host for goes by HTTP over TLS.

use crate::client;
use anyhow::{Context, Result};
use clap::Args;
use holdfast_api::{Code, Error, Health, Request, Response, refuse};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

/// Of an answer, which is of all volumes at most.
const ANSWER_BYTES_MAX: u64 = 1 << 28;

/// Hidden, since each command would tell of them; `holdfast --help` does.
#[derive(Args, Debug)]
pub struct RemoteArgs {
    /// A host of the grid, as its `api.tcp` has it
    #[arg(long, global = true, env = "HOLDFAST_AT", value_name = "https://ADDRESS:PORT", hide = true)]
    at: Option<String>,

    /// A file with what `holdfast grid tls operator NAME --token` printed
    #[arg(long, global = true, env = "HOLDFAST_TOKEN_FILE", value_name = "FILE", hide = true)]
    token_file: Option<PathBuf>,

    /// The certificate of the grid's authority
    #[arg(long, global = true, env = "HOLDFAST_CA_FILE", value_name = "FILE", hide = true)]
    ca_file: Option<PathBuf>,
}

impl RemoteArgs {
    pub fn is_meant(&self) -> bool {
        self.at.is_some()
    }
}

/// A host, and who asks it.
#[derive(Clone)]
pub struct Remote {
    at: String,
    token: String,
    agent: Agent,
}

impl PartialEq for Remote {
    fn eq(&self, other: &Remote) -> bool {
        (&self.at, &self.token) == (&other.at, &other.token)
    }
}

impl Eq for Remote {}

/// A token is not shown.
impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.at)
    }
}

impl Remote {
    /// Nothing where no other machine is meant.
    ///
    /// # Errors
    /// Something is missing, or can't be read.
    pub fn of(args: &RemoteArgs) -> Result<Option<Remote>> {
        let Some(at) = &args.at else { return Ok(None) };
        if !at.starts_with("https://") {
            refuse!(Code::Invalid, "`{at}` is no address of a host: write https://ADDRESS:PORT, as its api.tcp has it");
        }
        let token = read(args.token_file.as_deref(), "--token-file (or HOLDFAST_TOKEN_FILE), a file with a token")?;
        let ca = read(
            args.ca_file.as_deref(),
            "--ca-file (or HOLDFAST_CA_FILE), the `ca-cert.pem` of the grid's authority",
        )?;
        let ca = Certificate::from_pem(ca.as_bytes()).context("--ca-file has no certificate in PEM")?;
        let tls = TlsConfig::builder().root_certs(RootCerts::new_with_certs(&[ca])).build();
        let agent = Agent::config_builder().tls_config(tls).http_status_as_error(false).max_redirects(0).build();
        let at = at.trim_end_matches('/').to_string();
        Ok(Some(Remote { at, token: token.trim().to_string(), agent: agent.into() }))
    }

    /// # Errors
    /// The host refuses, or can't be reached.
    pub fn ask(&self, request: &Request, patience: Duration) -> Result<Response> {
        let to = self.agent.post(format!("{}/v1/requests", self.at)).header("Content-Type", "application/json");
        let body = serde_json::to_vec(request).expect("our requests always encode");
        let to = to.header("Authorization", format!("Bearer {}", self.token));
        self.answer(to.config().timeout_global(Some(patience)).build().send(&body[..]))
    }

    /// # Errors
    /// The host refuses, or can't be reached.
    pub fn health(&self) -> Result<Health> {
        let to =
            self.agent.get(format!("{}/v1/health", self.at)).header("Authorization", format!("Bearer {}", self.token));
        self.answer(to.config().timeout_global(Some(client::UNHURRIED)).build().call())
    }

    fn answer<T: DeserializeOwned>(&self, told: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Result<T> {
        let mut told = told.map_err(|error| {
            let why = format!(
                "the host at {} can't be asked: {error}; see whether api.tcp is set there (`holdfast config explain \
                 api.tcp`), and whether --ca-file is this grid's",
                self.at
            );
            Error::new(Code::Unavailable, why)
        })?;
        let is_right = told.status().is_success();
        let text = told.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec()?;
        if is_right {
            return serde_json::from_slice(&text).context("the host's answer makes no sense: is it another release?");
        }
        let refused: Result<Refused, _> = serde_json::from_slice(&text);
        match refused {
            Ok(Refused { error }) => Err(Error::new(error.code, error.message).into()),
            Err(_) => refuse!(Code::Failed, "{} answers {}: is it a host of Holdfast?", self.at, told.status()),
        }
    }
}

#[derive(Deserialize)]
struct Refused {
    error: RefusedError,
}

#[derive(Deserialize)]
struct RefusedError {
    code: Code,
    message: String,
}

fn read(path: Option<&Path>, what: &str) -> Result<String> {
    let Some(path) = path else {
        refuse!(
            Code::Invalid,
            "--at takes {what}; `holdfast grid tls operator NAME` makes both at a machine of the grid"
        );
    };
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
