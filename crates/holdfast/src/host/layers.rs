//! Layers before the volumes of this host: see [`holdfast_layer`].
//!
//! Role: the shell around [`Stack`]. Whoever asks a volume has a place in its table of askers until it is answered, whatever
//! layers do with the request; what they ask the controller has one there, too. So all that layers hold counts as under way,
//! and a session that must come behind it does ([`super::volumes::Behind`]).
//!
//! Layers live as long as this process has the volume in service: they are in no record, but for a volume's limit
//! ([`super::limits`]). They are drained before the volume
//! is closed or handed over, so that nothing comes out of them later; with a controller that is gone they are dropped, and
//! what they held is answered as what the controller had.
//!
//! Limits: what layers may ask beyond what they are asked is kept free in the table of askers.

use super::Host;
use super::commands::{ChangeOutcome, Command};
use super::control::ControlPlane;
use super::volumes::{Asker, Volume, Who};
use crate::logger;
use crate::resources;
use anyhow::Result;
use holdfast_api::{Code, LayerInfo, LayersInfo, VolumeInfo, refuse};
use holdfast_base::{BlockRequest, Effects, HeadId, Instant, Token};
use holdfast_layer::{Effect, LAYERS_MAX, Layer, LayerId, LayerView, OWN_MAX, Stack, StackEvent, build};
use holdfast_runtime::reactor::Io;
use holdfast_volume::controller::REQUESTS_MAX;
use holdfast_volume::{Event as VolumeEvent, State, Target};

/// What shall become of the layers of a volume or a clone.
pub enum LayerChange {
    /// Below those that are there.
    Add(Box<dyn Layer>),
    /// One, or all.
    Remove(Option<LayerId>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LayerOutcome {
    Done,
    NotOpen,
    TooMany,
    NoSuch,
    /// It is the volume's limit, which is set and taken away as such.
    Kept,
}

impl Volume {
    fn stack(&mut self, head: HeadId) -> Option<&mut Stack> {
        self.layers.iter_mut().find(|(of, _)| *of == head).map(|(_, stack)| stack)
    }

    /// Whether a layer is the limit that the records tell of.
    fn is_kept(&self, head: HeadId, layer: LayerId) -> bool {
        self.kept.get(&head).is_some_and(|kept| kept.layer == Some(layer))
    }

    /// Before it is changed in a way that nothing under way may follow.
    pub(super) fn check_layers_are_clear(&self, head: HeadId) -> Result<(), ChangeOutcome> {
        let holds = |(of, stack): &(HeadId, Stack)| *of == head && stack.in_flight() > 0;
        if self.layers.iter().any(holds) {
            return Err(ChangeOutcome::Refused("layers hold requests of clients that are gone"));
        }
        Ok(())
    }

    pub(super) fn layers_info(&self, head: HeadId) -> Option<Box<LayersInfo>> {
        let (_, stack) = self.layers.iter().find(|(of, _)| *of == head)?;
        let info = |view: LayerView| LayerInfo {
            id: view.id.0,
            spec: view.spec,
            tool: view.nature.is_tool,
            leaving: view.is_leaving,
            kept: self.is_kept(head, view.id),
            above: resources::edge(view.above),
            counters: view.counters.into_iter().map(|(name, count)| (name.to_string(), count)).collect(),
        };
        let layers = stack.layers().into_iter().map(info).collect();
        Some(Box::new(LayersInfo { layers, below: resources::edge(stack.below()) }))
    }
}

impl Host {
    /// Gives a request that has its asker to the controller, by the layers that stand before it.
    pub(super) fn pass(&mut self, now: Instant, at: Token, target: Target, request: BlockRequest, io: &mut Io) {
        if let (Target::Head(head), false) = (target, self.volumes.limits.is_empty()) {
            self.keep_to_limit(now, at, head, io);
        }
        let volume = self.volumes.table.get(at);
        if let Target::Head(head) = target
            && volume.is_some_and(|volume| volume.layers.iter().any(|(of, _)| *of == head))
        {
            return self.drive_layers(now, at, head, StackEvent::Request(request), io);
        }
        self.drive(now, at, VolumeEvent::Request { target, request }, io);
    }

    pub(super) fn drive_layers(&mut self, now: Instant, at: Token, head: HeadId, event: StackEvent, io: &mut Io) {
        let Some(volume) = self.volumes.table.get_mut(at) else { return };
        let Some(stack) = volume.stack(head) else { return };
        let mut out = Effects::new();
        stack.handle(now, event, &mut out);
        if stack.is_idle() {
            volume.layers.retain(|(of, _)| *of != head);
        }
        volume.deadline = volume.next_deadline();
        for effect in out.take() {
            match effect {
                Effect::Up(reply) => self.replies.push_back((at, reply)),
                Effect::Down(BlockRequest { token, op }) => {
                    let Some(volume) = self.volumes.table.get_mut(at) else { return };
                    let asker = Asker { who: Who::Layers(head), token, op: None, since: now, changes: None };
                    let request = BlockRequest { token: volume.note_asker(asker), op };
                    self.drive(now, at, VolumeEvent::Request { target: Target::Head(head), request }, io);
                }
            }
        }
    }

    fn layered_heads(&self, at: Token) -> Vec<HeadId> {
        self.volumes.table.get(at).map_or(Vec::new(), |v| v.layers.iter().map(|(head, _)| *head).collect())
    }

    pub(super) fn tick_layers(&mut self, now: Instant, at: Token, io: &mut Io) {
        for head in self.layered_heads(at) {
            self.drive_layers(now, at, head, StackEvent::Tick, io);
        }
    }

    /// The volume is about to be closed or handed over: all that layers hold goes to the controller before it hears of that.
    pub(super) fn drain_layers(&mut self, now: Instant, at: Token, io: &mut Io) {
        for head in self.layered_heads(at) {
            self.drain_layers_of(now, at, head, io);
        }
    }

    pub(super) fn drain_layers_of(&mut self, now: Instant, at: Token, head: HeadId, io: &mut Io) {
        if let Some(volume) = self.volumes.table.get_mut(at)
            && let Some(stack) = volume.stack(head)
        {
            let count = stack.layers().len();
            logger::info(format_args!("volume {}: its layers ({count}) are drained, and gone", volume.name));
            volume.kept.remove(&head);
            self.drive_layers(now, at, head, StackEvent::Drain, io);
        }
    }

    pub(super) fn change_layers(&mut self, now: Instant, name: &str, change: LayerChange, io: &mut Io) -> LayerOutcome {
        let Some((at, head)) = self.volumes.find_open(name) else { return LayerOutcome::NotOpen };
        let serves = |v: &&mut Volume| v.exported && matches!(v.controller.state(), State::Opening | State::Open);
        let Some(volume) = self.volumes.table.get_mut(at).filter(serves) else { return LayerOutcome::NotOpen };
        match change {
            LayerChange::Add(layer) => {
                volume.add_layer(head, layer).map_or_else(|outcome| outcome, |_| LayerOutcome::Done)
            }
            LayerChange::Remove(id) => {
                if id.is_some_and(|id| volume.is_kept(head, id)) {
                    return LayerOutcome::Kept;
                }
                let stands: Vec<LayerId> = volume.stack(head).map_or(Vec::new(), |stack| stack.standing());
                let asked = |of: &LayerId| id.is_none_or(|id| id == *of) && !volume.is_kept(head, *of);
                let going: Vec<LayerId> = stands.into_iter().filter(asked).collect();
                if going.is_empty() && id.is_some() {
                    return LayerOutcome::NoSuch;
                }
                for id in going {
                    logger::info(format_args!("volume {name}: layer {id} is removed"));
                    self.drive_layers(now, at, head, StackEvent::Remove(id), io);
                }
                LayerOutcome::Done
            }
        }
    }
}

impl Volume {
    pub(super) fn add_layer(&mut self, head: HeadId, layer: Box<dyn Layer>) -> Result<LayerId, LayerOutcome> {
        if !self.has_room_beside_layers(LAYERS_MAX * OWN_MAX) {
            return Err(LayerOutcome::TooMany);
        }
        let name = self.name_of(head);
        let (spec, is_tool) = (layer.spec().to_string(), layer.nature().is_tool);
        if self.stack(head).is_none() {
            self.layers.push((head, Stack::new(REQUESTS_MAX)));
        }
        let Some(id) = self.stack(head).and_then(|stack| stack.add(layer)) else { return Err(LayerOutcome::TooMany) };
        if is_tool {
            logger::warn(format_args!(
                "volume {name}: layer {id}, {spec}, makes it worse on purpose; `holdfast volume layer remove {name}` ends that"
            ));
        } else {
            logger::info(format_args!("volume {name}: layer {id}, {spec}, stands before it"));
        }
        Ok(id)
    }
}

impl ControlPlane {
    pub(super) fn add_layer(&self, name: &str, spec: &str) -> Result<VolumeInfo> {
        let layer = match build(spec) {
            Ok(layer) => layer,
            Err(error) => refuse!(
                Code::Invalid,
                "`{spec}` makes no layer: {error}; `holdfast volume layer kinds` tells what there is"
            ),
        };
        self.change_layers(name, LayerChange::Add(layer), None)
    }

    pub(super) fn remove_layer(&self, name: &str, layer: Option<u32>) -> Result<VolumeInfo> {
        self.change_layers(name, LayerChange::Remove(layer.map(LayerId)), layer)
    }

    fn change_layers(&self, name: &str, change: LayerChange, layer: Option<u32>) -> Result<VolumeInfo> {
        self.catalog.find(name)?;
        match self.ask(|answer| Command::Layers { volume: name.to_string(), change, answer })? {
            LayerOutcome::Done => self.show(name),
            LayerOutcome::NotOpen => {
                refuse!(
                    Code::State,
                    "volume {name} is not in service here; `holdfast volume export {name}`, then try again"
                )
            }
            LayerOutcome::TooMany => refuse!(
                Code::Invalid,
                "volume {name} has as many layers as it can have ({LAYERS_MAX}), or as many requests under way; \
                 `holdfast volume layer list {name}`, and remove one first"
            ),
            LayerOutcome::Kept => refuse!(
                Code::State,
                "layer {} is the limit of volume {name}, which it keeps wherever it is served; `holdfast volume set {name} --limit \
                 none` takes it away",
                layer.map_or_else(String::new, |layer| layer.to_string())
            ),
            LayerOutcome::NoSuch => refuse!(
                Code::NotFound,
                "volume {name} has no layer {}; `holdfast volume layer list {name}` tells their numbers",
                layer.map_or_else(String::new, |layer| layer.to_string())
            ),
        }
    }
}
