//! The key of the grid's authority goes to another machine: over TLS between the two hosts, whose bytes travel as errands.
//!
//! ```text
//! giver ──errand: hello─────────────> taker ──done: its certificate──> giver
//! giver ──errand: certificate, key──> taker ──done: "taken"──────────> giver
//! ```
//! Role: a machine that signs gives the key to another one where no other has it, so that the loss of one changes nothing; by
//! command to any. The metadata store, which carries the bytes, reads and changes none of them.
//!
//! Invariants
//! 1. The key leaves only to the very host that was meant, which has shown its certificate, and after a look whether that was
//!    revoked.
//! 2. Only a host of the grid can give a key, and only the authority's own is taken.
//!
//! Limits: [`SESSIONS_MAX`] under way at a host, each for [`SESSION_LIFE`].

use super::control::ControlPlane;
use super::errands::Errand;
use super::signer::AuthorityCopy;
use crate::logger;
use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use holdfast_api::{Code, refuse};
use holdfast_runtime::pki::Role;
use holdfast_runtime::tls::TlsStream;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const SESSIONS_MAX: usize = 8;

const SESSION_LIFE: Duration = Duration::from_secs(30);

/// How long one errand of it may take.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// A handshake and an answer take two.
const ROUNDS_MAX: usize = 6;

/// Sessions of hosts that are about to give a key, by their names.
#[derive(Default)]
pub(super) struct Sessions(BTreeMap<String, (TlsStream, Vec<u8>, Instant)>);

fn sealed(stream: &mut TlsStream) -> String {
    let mut bytes = Vec::new();
    stream.take_ciphertext(&mut bytes);
    URL_SAFE_NO_PAD.encode(bytes)
}

fn opened(stream: &mut TlsStream, text: &str, heard: &mut Vec<u8>) -> Result<()> {
    let mut bytes = URL_SAFE_NO_PAD.decode(text).context("it is no message of a session")?;
    Ok(stream.on_ciphertext(&mut bytes, heard)?)
}

/// A message that is whole.
fn line(heard: &[u8]) -> Option<&[u8]> {
    heard.strip_suffix(b"\n")
}

impl ControlPlane {
    /// Gives the key to another machine that is up.
    pub(super) fn give_authority(&self, to: &str) -> Result<()> {
        let certificates = &self.revocations.certificates;
        let kept = AuthorityCopy::read(certificates)?;
        let there = self.hosts_there();
        if to == self.catalog.host() {
            refuse!(Code::State, "this machine has the key of the grid's authority already");
        }
        if !there.contains(to) {
            let up: Vec<&str> = there.iter().map(String::as_str).collect();
            refuse!(Code::NotFound, "there is no host {to} that is up; those are: {}", up.join(", "));
        }
        let mut stream = self.revocations.load_host(self.catalog.host())?.connect(Role::Host(to.to_string()))?;
        let (session, mut heard, mut is_told) = (uuid::Uuid::new_v4().to_string(), Vec::new(), false);
        for _ in 0..ROUNDS_MAX {
            let errand = Errand::Secured { session: session.clone(), bytes: sealed(&mut stream) };
            let told = self.send_errand(to, &errand, ANSWER_MAX)??;
            opened(&mut stream, told.as_str().unwrap_or_default(), &mut heard)
                .with_context(|| format!("host {to} is not who it should be"))?;
            if let Some(answer) = line(&heard) {
                let answer: Result<(), String> = serde_json::from_slice(answer).context("its answer makes no sense")?;
                return answer.map_err(|why| anyhow::anyhow!("host {to} did not take it: {why}"));
            }
            if !stream.is_handshaking() && !std::mem::replace(&mut is_told, true) {
                // The handshake took a while, and what was given can't be taken back.
                self.look_who_is_revoked().context("whether it was revoked can't be told now")?;
                if self.revocations.lists.iter().any(|list| list.covers_peer(&stream)) {
                    refuse!(Code::NotPermitted, "the certificate of host {to} was revoked meanwhile");
                }
                let mut message = serde_json::to_vec(&kept).expect("our records always encode");
                message.push(b'\n');
                stream.send(&message);
            }
        }
        refuse!(Code::Unavailable, "host {to} has not answered whether it has the key")
    }

    /// The other side of that: what a host says that may be about to give the key, and what it is answered.
    pub(super) fn on_secured(&self, session: &str, bytes: &str) -> Result<Value> {
        let certificates = &self.revocations.certificates;
        let mut sessions = self.sessions();
        let now = Instant::now();
        sessions.0.retain(|_, (.., since)| now.duration_since(*since) < SESSION_LIFE);
        if !sessions.0.contains_key(session) {
            if sessions.0.len() >= SESSIONS_MAX {
                refuse!(Code::Unavailable, "too many hosts are about to give it a key; try again in a minute");
            }
            let door = certificates.load_host_server(self.catalog.host())?;
            if let Some(revoked) = self.revocations.known() {
                door.revoked().replace(&revoked);
            }
            sessions.0.insert(session.to_string(), (door.accept()?, Vec::new(), now));
        }
        let (stream, heard, _) = sessions.0.get_mut(session).expect("just seen");
        if let Err(error) = opened(stream, bytes, heard) {
            sessions.0.remove(session);
            return Err(error);
        }
        let Some(message) = line(heard) else { return Ok(Value::from(sealed(stream))) };
        let taken = self.take_authority(message).map_err(|error| format!("{error:#}"));
        let mut answer = serde_json::to_vec(&taken).expect("our records always encode");
        answer.push(b'\n');
        stream.send(&answer);
        let told = sealed(stream);
        sessions.0.remove(session);
        Ok(Value::from(told))
    }

    fn take_authority(&self, message: &[u8]) -> Result<()> {
        let kept: AuthorityCopy = serde_json::from_slice(message).context("it is no key")?;
        kept.take(&self.revocations.certificates)?;
        logger::info(format_args!("this machine has the key of the grid's authority from here on, and signs"));
        self.note_certificates(&self.dir.load()?)
    }

    /// Gives the key to the first of these machines that takes it.
    pub(super) fn give_to_one_of(&self, machines: &[String]) -> Result<()> {
        let mut why = Ok(());
        for to in machines {
            why = self.give_authority(to);
            if why.is_ok() {
                logger::info(format_args!(
                    "machine {to} has the key of the grid's authority as well, so that the loss of this one changes nothing \
                     (setting authority.spread)"
                ));
                break;
            }
        }
        why
    }
}
