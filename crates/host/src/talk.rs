//! What volumes of a sharing domain tell each other, wherever their owners are: here, on another reactor of this host, or
//! at another host. All of it may be lost, and is told again by whoever needs it (protocol rule 28).
//!
//! Role: a host knows which hosts serve the volumes that its own may talk with, as the records say. Where that is not
//! known, or is this host, its reactors are all told, and the one that has the volume hears it.

use crate::event::Effect;
use crate::forward::{IngressEvent, Peer};
use crate::groups::Sibling;
use crate::host::{Host, Out};
use crate::volumes::Volume;
use holdfast_base::{Buf, Instant, Token, VolumeId};
use holdfast_format::talk::Talk;
use holdfast_volume::Event as VolumeEvent;

/// How far a message has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reach {
    /// From a volume here.
    Begun,
    /// From another host.
    AtHost,
    /// From another reactor of this host: nobody else is told.
    AtReactor,
}

impl Host {
    /// One of the volumes here tells another something.
    pub(crate) fn on_talk(&mut self, now: Instant, from: Token, to: VolumeId, talk: Box<Talk>, out: Out) {
        if let Some(from) = self.volumes.table.get(from).map(Volume::id) {
            self.pass_on_talk(now, (from, to), talk, Reach::Begun, out);
        }
    }

    pub(crate) fn on_talk_of_sibling(&mut self, now: Instant, from: VolumeId, to: VolumeId, talk: Box<Talk>, out: Out) {
        self.pass_on_talk(now, (from, to), talk, Reach::AtReactor, out);
    }

    /// A host of this grid passes on what a volume of its own has said. What nobody here understands is lost.
    pub(crate) fn on_talk_of_host(&mut self, now: Instant, from: VolumeId, to: VolumeId, bytes: &Buf, out: Out) {
        if let Ok(talk) = Talk::decode(bytes) {
            self.pass_on_talk(now, (from, to), Box::new(talk), Reach::AtHost, out);
        }
    }

    fn pass_on_talk(&mut self, now: Instant, between: (VolumeId, VolumeId), talk: Box<Talk>, reach: Reach, out: Out) {
        let (from, to) = between;
        if let Some(at) = self.volumes.find_id(to) {
            return self.drive(now, at, VolumeEvent::Talk { from, talk }, out);
        }
        match self.peer_that_serves(to).filter(|_| reach == Reach::Begun) {
            Some(peer) => {
                let payload = Buf::copy_from(&talk.encode());
                self.forward.events.push_back(IngressEvent::Tell { peer, from, to, payload });
            }
            None if reach != Reach::AtReactor => {
                for reactor in self.volumes.siblings.clone() {
                    let message = Sibling::Talk { from, to, talk: talk.clone() };
                    out.push(Effect::Sibling { reactor, message });
                }
            }
            None => {}
        }
    }

    fn peer_that_serves(&self, volume: VolumeId) -> Option<Peer> {
        let host = self.forward.heard_at.get(&volume)?;
        self.forward.hosts.get(host).copied()
    }
}
