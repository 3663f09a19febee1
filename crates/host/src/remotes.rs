//! Sessions that other hosts have attached to volumes that are served here.
//!
//! Role: binds them when the volume serves, gives what they ask to its controller, and lets them go when it serves no more.
//! What must come behind what was asked before waits at the barrier, as this host's own sessions do.

use crate::forward::{Binding, LinkId, OwnerEvent};
use crate::host::{Host, Out, info};
use crate::requests::{Barrier, Origin, Requester};
use crate::turns::Left;
use crate::volumes::{SESSIONS_MAX, split_export};
use crate::writers::SessionId;
use holdfast_base::{BlockError, BlockReply, BlockRequest, HeadId, Instant, Token, VolumeId};
use holdfast_format::forward::{Client as Association, Refusal};
use holdfast_volume::{Event as VolumeEvent, State, Target};

/// A session of another host, bound to a volume here.
pub(crate) struct Remote {
    volume: Token,
    target: Target,
    head: HeadId,
}

/// Whose client that is, who it is, when its last write was answered, and whether it was followed.
pub(crate) struct Introduced {
    pub host: String,
    pub client: Association,
    pub wrote_at: Option<Instant>,
    pub is_fenced: bool,
}

impl Host {
    pub(crate) fn bind_remote(&mut self, remote: Token, export: String, out: Out) {
        let found = self.volumes.find_open(split_export(&export).0);
        let open = found.and_then(|(at, _)| self.volumes.table.get_mut(at));
        if !open.is_some_and(|volume| volume.requests.waits(Barrier::Remote(remote, export.clone()))) {
            self.bind_remote_now(remote, export, out);
        }
    }

    /// What was asked before is done.
    pub(crate) fn bind_remote_now(&mut self, remote: Token, export: String, out: Out) {
        // One that has gone meanwhile is told of all the same.
        let introduced = self.forward.introduced.get(&remote);
        let known = introduced.map(|of| (of.host.clone(), of.client.clone(), (of.wrote_at, of.is_fenced)));
        let (host, client, standing) = known.unwrap_or_default();
        let (name, snapshot) = split_export(&export);
        let found = self.volumes.find_open(name);
        let volume = found.and_then(|(at, head)| Some((at, head, self.volumes.table.get(at)?)));
        let binding = match volume.filter(|(_, _, v)| v.exported || v.controller.is_preloading()) {
            // What is asked of an opening that hangs may be done by others before it serves.
            Some((_, _, volume)) if volume.controller.state() == State::Opening => {
                return self.forward.binding.push((remote, export));
            }
            Some((_, _, volume)) if volume.sessions() >= SESSIONS_MAX => Binding::Refused(Refusal::Full),
            Some((at, head, volume)) if volume.controller.state() == State::Open => {
                let layer = snapshot.map(|snapshot| volume.snapshot(head, snapshot).map(|(layer, _)| layer));
                match layer {
                    Some(None) => Binding::Refused(Refusal::Unknown),
                    layer => {
                        let target = layer.flatten().map_or(Target::Head(head), Target::Snapshot);
                        info(out, format!("host {host} opens {export} for a client"));
                        self.forward.remotes.insert(remote, Remote { volume: at, target, head });
                        self.volumes.table.get_mut(at).expect("just found").add_session(head);
                        self.open_writer((at, target), SessionId::Remote(remote), client, standing);
                        Binding::Bound
                    }
                }
            }
            _ => Binding::Refused(Refusal::NotOwner),
        };
        if binding != Binding::Bound {
            self.forward.introduced.remove(&remote);
        }
        self.forward.owner_events.push_back(OwnerEvent::Bound { remote, binding });
    }

    pub(crate) fn forget_remote(&mut self, remote: Token) {
        self.forward.introduced.remove(&remote);
        let Some(Remote { volume: at, head, target }) = self.forward.remotes.remove(&remote) else { return };
        if let Some(volume) = self.volumes.table.get_mut(at) {
            volume.remove_session(head);
        }
        self.close_writer((at, target), SessionId::Remote(remote));
        self.turns.left.push_back(Left::Session { at, session: SessionId::Remote(remote) });
    }

    pub(crate) fn submit_remote(
        &mut self,
        now: Instant,
        remote: Token,
        (request, block): (Token, BlockRequest),
        out: Out,
    ) {
        let found = self.forward.remotes.get(&remote).map(|r| (r.volume, r.target));
        let Some((at, target)) = found.filter(|(at, _)| self.volumes.table.get(*at).is_some()) else {
            let reply = BlockReply { token: block.token, result: Err(BlockError::Deposed) };
            return self.forward.owner_events.push_back(OwnerEvent::Reply { request, reply });
        };
        let requester = Requester::Remote(request);
        let origin = Origin { requester, token: block.token, op: None, since: now, came_at: now, changes: None };
        self.enter(now, (at, target), SessionId::Remote(remote), (origin, block.op), out);
    }

    /// Remote sessions that use a head, its snapshots included, or only one target.
    pub(crate) fn remotes_of(&self, at: Token, head: HeadId, target: Option<Target>) -> usize {
        let uses = |r: &&Remote| r.volume == at && r.head == head && target.is_none_or(|target| r.target == target);
        self.forward.remotes.values().filter(uses).count()
    }

    fn remotes_where(&self, is_meant: impl Fn(&Remote) -> bool) -> Vec<Token> {
        let found = self.forward.remotes.iter().filter(|(_, remote)| is_meant(remote));
        found.map(|(token, _)| *token).collect()
    }

    /// Cuts remote sessions off that use a head.
    pub(crate) fn cut_remotes_of(&mut self, at: Token, head: HeadId) {
        for remote in self.remotes_where(|remote| remote.volume == at && remote.head == head) {
            self.forget_remote(remote);
            self.forward.owner_events.push_back(OwnerEvent::Unserved { remote });
        }
    }

    /// A controller is gone: what was bound to it is over, and what waits for it looks again.
    pub(crate) fn unserve_remotes(&mut self, at: Token, out: Out) {
        for remote in self.remotes_where(|remote| remote.volume == at) {
            self.forward.remotes.remove(&remote);
            self.forward.introduced.remove(&remote);
            self.forward.owner_events.push_back(OwnerEvent::Unserved { remote });
        }
        for (remote, export) in std::mem::take(&mut self.forward.binding) {
            self.bind_remote(remote, export, out);
        }
    }

    /// Another host asks for the volume.
    pub(crate) fn begin_yield(&mut self, now: Instant, volume: VolumeId, (link, token): (LinkId, u64), out: Out) {
        let at = self.volumes.find_id(volume).filter(|_| self.serves(volume));
        let Some(at) = at else {
            let refusal = Some(Refusal::NotOwner);
            return self.forward.owner_events.push_back(OwnerEvent::Yielded { link, token, refusal });
        };
        info(out, format!("volume {volume} is handed over"));
        self.forward.yielding.push((at, link, token));
        self.drain_filters(now, at, out);
        self.drive(now, at, VolumeEvent::Yield, out);
    }

    /// The client of a remote session, as its host tells it.
    pub fn association_of(&self, remote: Token) -> Option<&Association> {
        self.forward.introduced.get(&remote).map(|of| &of.client)
    }

    /// Remote sessions that are bound here.
    pub fn remote_sessions(&self) -> Vec<Token> {
        self.remotes_where(|_| true)
    }
}
