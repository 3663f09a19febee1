//! The control sockets: requests of the command line, one JSON line each, served by a thread a connection.
//!
//! Role: sequences metadata records and commands to the reactor into what an operator asks for. Threads here may block;
//! the reactor never waits for them.
//!
//! Limits: [`CONNECTIONS_MAX`] connections; [`ANSWER_MAX`] for the reactor's answers.

use super::alerts;
use super::assignment::{self, Assignment, Hold, Input};
use super::authority::Sessions;
use super::catalog::{Catalog, CloneRecord, Entry, Reserving, Settings, StillNeeded, What, check_name};
use super::commands::{Answer, Command, LiveStatus, Weakness};
use super::control_sockets;
use super::devices::TaskHistory;
use super::errands;
use super::health;
use super::http;
use super::keys::{Keys, NewKey};
use super::limits;
use super::meta::{Health, Meta};
use super::peer_query;
use super::presence::{Presence, check_nodes_pack};
use super::reactors::{Busy, Reactors};
use super::record_watch;
use super::records::Records;
use super::revocation::Revocations;
use super::sharing::{NO_DOMAIN, check_stays};
use super::steward::{self, Stewardship};
use super::upkeep;
use crate::client::HANG_UP_MAX;
use crate::config::HostSettings;
use crate::grid::layout::{GridConfig, GridDir};
use crate::grid::metadata;
use crate::logger;
use crate::protocol::{self, LINE_BYTES_MAX, read};
use anyhow::{Context, Error, Result};
use holdfast_api::{
    AlertTrouble, Code, DeviceInfo, HostStatus, KeySource, Kind, PackingInfo, Request, Response, Role, SIZE_BYTES_MAX,
    SIZE_BYTES_MIN, TrashInfo, Unreadable, VolumeInfo, VolumeState, refuse,
};
use holdfast_base::size::Size;
use holdfast_base::{BLOCK_BYTES, NodeId, VolumeId};
use holdfast_cluster::forecast::Forecast;
use holdfast_format::features::Feature;
use holdfast_format::geometry::Layout;
use holdfast_format::packing::Compression;
use holdfast_format::root::Root;
use holdfast_format::schedule::ScheduleRecord;
use holdfast_format::tier::Tiers;
use holdfast_host::homes::Offered;
use holdfast_host::reservation::{Reservation, ReservedVolume, owned_bytes};
use holdfast_host::views::Published;
use holdfast_host::{
    ChangeOutcome, CloseOutcome, OpenSpec, Order, Outcome, PackingFigures, Policy, ResizeOutcome, Wanted, split_export,
};
use holdfast_runtime::clock;
use holdfast_runtime::process;
use holdfast_verdict::volumes::{integrity_of, provisioning_of, schedule_info};
use holdfast_volume::Question;
use holdfast_volume::protect::{self, Protect};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const CONNECTIONS_MAX: usize = 256;

/// Where nothing can be accepted: files are short, maybe.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// How long the reactor may take to answer what it knows by heart.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(5);

/// How long a volume may take to open before the answer says that it is still opening.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// Pause before an opening is tried again that another one has overtaken.
const OPEN_AGAIN: Duration = Duration::from_millis(300);

/// How long a clean close may take: its log is destaged first.
pub(super) const CLOSE_MAX: Duration = Duration::from_secs(120);

/// How long a snapshot may take: bulk writes that are part of it are waited for.
pub(super) const CHANGE_MAX: Duration = Duration::from_secs(30);

const RESIZE_MAX: Duration = Duration::from_secs(10);

/// Asks the reactor, and waits for its answer.
pub fn ask<T>(reactors: &Arc<Reactors>, patience: Duration, command: impl FnOnce(Answer<T>) -> Command) -> Result<T> {
    await_answer(patience, |answer| reactors.post(command(answer)))
}

fn await_answer<T>(patience: Duration, post: impl FnOnce(Answer<T>) -> Result<(), Busy>) -> Result<T> {
    let (answer, answered) = sync_channel(1);
    if post(Answer::Whole(answer)).is_err() {
        refuse!(Code::Unavailable, "the host is too busy to take commands; try again");
    }
    match answered.recv_timeout(patience) {
        Ok(answer) => Ok(answer),
        Err(_) => refuse!(Code::Unavailable, "the host did not answer in time; `holdfast status` shows what it does"),
    }
}

pub(super) struct ControlPlane {
    pub(super) catalog: Catalog,
    pub(super) records: Arc<Records>,
    pub(super) assignment: Assignment,
    /// What the reactor was told last.
    shared: Mutex<Option<BTreeSet<VolumeId>>>,
    pub(super) offered: Mutex<Option<Offered>>,
    /// Hosts of releases that know one reactor only, as it was told last.
    pub(super) older_hosts: Mutex<Vec<String>>,
    pub(super) presence: Presence,
    pub(super) keys: Arc<Keys>,
    pub(super) revocations: Revocations,
    health: Health,
    pub(super) meta: Meta,
    pub(super) reactors: Arc<Reactors>,
    pub(super) stewardship: Stewardship,
    /// Which devices had no copy of the records when that was told last.
    pub(super) copies_told: Mutex<Option<(usize, String)>>,
    pub(super) dir: GridDir,
    config: Mutex<GridConfig>,
    /// As they were when the host started.
    pub(super) settings: HostSettings,
    history: Mutex<TaskHistory>,
    forecast: Mutex<Forecast>,
    pub(super) published: Mutex<Published>,
    /// Ways by which people can't be told what is not well.
    pub(super) alert_troubles: Mutex<Vec<AlertTrouble>>,
    /// What could not be looked after, and why, so that it is told once.
    pub(super) unseen: Mutex<BTreeMap<String, String>>,
    /// Held while volumes are made, deleted, or taken in or out of service: one such operation at a time.
    changes: Mutex<()>,
    /// Held while lists of clients and of revoked certificates are read and taken in: what was read first counts first. Nobody
    /// waits for an operation of the former kind to be shut out.
    access: Mutex<()>,
    /// Held while other hosts are asked: one query at a time.
    peer_queries: Mutex<()>,
    /// Of hosts that give the key of the grid's authority.
    sessions: Mutex<Sessions>,
}

/// How a volume is made.
struct How {
    layout: String,
    export: bool,
    fixed: bool,
    checked_reads: bool,
    compression: Compression,
    tiers: Tiers,
    key: Option<KeySource>,
    limit: Option<String>,
}

/// What of a volume is to change; nothing else does.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct ToSet<'a> {
    layout: Option<&'a str>,
    fixed: Option<bool>,
    checked_reads: Option<bool>,
    compression: Option<Compression>,
    tiers: Option<Tiers>,
    limit: Option<&'a str>,
    sharing: Option<&'a str>,
}

/// What the records tell beside volumes.
#[derive(Default)]
struct CatalogReport {
    /// Names of the volumes whose space is being returned.
    deleting: Vec<String>,
    trash: Vec<TrashInfo>,
    /// Volumes whose records this release can't read.
    unreadable: Vec<Unreadable>,
}

/// Opens the sockets and serves them from threads of its own.
pub fn start(
    dir: &GridDir,
    (config, settings): (&GridConfig, HostSettings),
    (meta, records, catalog, presence, keys): (Meta, Arc<Records>, Catalog, Presence, Arc<Keys>),
    revocations: Revocations,
    (reactors, assignment, inputs): (Arc<Reactors>, Assignment, Receiver<Input>),
    api_connections: usize,
) -> Result<()> {
    let sockets = control_sockets::open(dir, settings.readers.as_deref())?;
    let heard = Arc::clone(&records);
    let health = Health::watch(meta.clone(), move |is_healthy| heard.note_health(is_healthy))?;
    let (stewardship, events) = Stewardship::new();
    let forecast = Mutex::new(Forecast::new(catalog.trend()?));
    let plane = Arc::new(ControlPlane {
        forecast,
        catalog,
        records,
        assignment,
        offered: Mutex::default(),
        older_hosts: Mutex::default(),
        shared: Mutex::default(),
        presence,
        keys,
        revocations,
        health,
        meta: meta.clone(),
        reactors,
        stewardship,
        copies_told: Mutex::default(),
        dir: dir.clone(),
        config: Mutex::new(config.clone()),
        settings,
        history: Mutex::default(),
        published: Mutex::default(),
        alert_troubles: Mutex::default(),
        unseen: Mutex::default(),
        changes: Mutex::new(()),
        access: Mutex::new(()),
        peer_queries: Mutex::new(()),
        sessions: Mutex::default(),
    });
    upkeep::start(&plane)?;
    peer_query::start(Arc::clone(&plane), meta.clone())?;
    errands::start(Arc::clone(&plane), meta)?;
    record_watch::start(Arc::clone(&plane))?;
    assignment::start(&plane, inputs)?;
    steward::start(&plane, events)?;
    http::start(&plane, sockets.api, api_connections)?;
    health::start(&plane)?;
    alerts::start(&plane)?;
    for (listener, role) in sockets.control {
        let plane = Arc::clone(&plane);
        let serve = move || accept(&listener, role, &plane);
        std::thread::Builder::new().name("control".to_string()).spawn(serve)?;
    }
    Ok(())
}

/// The next one, as soon as one can be taken: where files are short that fails at once, and again.
fn next<T>(mut accept: impl FnMut() -> std::io::Result<T>, mut pause: impl FnMut()) -> T {
    loop {
        match accept() {
            Ok(connection) => return connection,
            Err(_) => pause(),
        }
    }
}

fn accept(listener: &UnixListener, role: Role, plane: &Arc<ControlPlane>) {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let (stream, _) = next(|| listener.accept(), || std::thread::sleep(ACCEPT_PAUSE));
        if open.load(Ordering::Relaxed) >= CONNECTIONS_MAX {
            continue;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let (plane, count) = (Arc::clone(plane), Arc::clone(&open));
        let served = std::thread::Builder::new().name("control-client".to_string()).spawn(move || {
            // A client that leaves early hears no answer; what it asked for is done all the same.
            let _ = serve(&stream, role, &plane);
            count.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(error) = served {
            open.fetch_sub(1, Ordering::Relaxed);
            logger::error(format_args!("no thread for a control connection: {error}; check `ulimit -u`"));
        }
    }
}

fn serve(stream: &UnixStream, role: Role, plane: &ControlPlane) -> Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if (&mut reader).take(LINE_BYTES_MAX as u64).read_line(&mut line)? == 0 {
            return Ok(());
        }
        if !line.ends_with('\n') {
            // Cut off on its way, or without end: nothing of it is done, and what follows makes no sense.
            let message = format!("a request is one line of at most {LINE_BYTES_MAX} bytes, and this one has no end");
            return say(stream, &Response::Error { message, code: Code::Invalid });
        }
        let response = match serde_json::from_str::<Request>(&line) {
            Ok(request) => plane.asked(role, request),
            Err(error) => Response::Error {
                message: format!("the host does not understand the request: {error}"),
                code: Code::Unsupported,
            },
        };
        say(stream, &response)?;
    }
}

fn say(mut stream: &UnixStream, response: &Response) -> Result<()> {
    let mut text = serde_json::to_string(response).expect("our responses always encode");
    text.push('\n');
    Ok(stream.write_all(text.as_bytes())?)
}

/// Whether tiers go with the rest of a volume, which is given with them, or is there.
fn check_tiers(tiers: Tiers, layout: Layout, size_bytes: u64, code: Code) -> Result<()> {
    tiers.check(layout, size_bytes).map_err(|why| holdfast_api::Error::new(code, why.to_string()).into())
}

pub(super) fn check_size(size_bytes: u64) -> Result<()> {
    if !(SIZE_BYTES_MIN..=SIZE_BYTES_MAX).contains(&size_bytes) {
        refuse!(
            Code::Invalid,
            "a volume has from {} to {}; choose a size between",
            Size(SIZE_BYTES_MIN),
            Size(SIZE_BYTES_MAX)
        );
    }
    if !size_bytes.is_multiple_of(BLOCK_BYTES as u64) {
        refuse!(
            Code::Invalid,
            "a volume has whole blocks of {BLOCK_BYTES} bytes, and {size_bytes} is no multiple; choose a rounder size"
        );
    }
    Ok(())
}

impl ControlPlane {
    /// By who may do that, or not.
    pub(super) fn asked(&self, role: Role, request: Request) -> Response {
        match role.check(&request) {
            Ok(()) => self.respond(request),
            Err(error) => protocol::failure(&error.into()),
        }
    }

    fn respond(&self, request: Request) -> Response {
        // Before this one is alone: it may be the one that is to take the volume over.
        if let Request::VolumeHandover { name, to } = &request
            && let Some(handed) = self.pass_handover_on(name, to)
        {
            return handed.unwrap_or_else(|error| protocol::failure(&error));
        }
        if let Request::MachineRemove { name, dead, accept_loss } = &request
            && let Some(removed) = self.pass_removal_on(name, *dead, *accept_loss)
        {
            return removed.unwrap_or_else(|error| protocol::failure(&error));
        }
        // Of others nobody hears without the store; what this host knows it tells.
        let is_told_here = request.kind() == Kind::Look && self.store_trouble().is_some();
        if let Some(response) = (!is_told_here).then(|| self.pass_on(&request)).flatten() {
            return response;
        }
        self.respond_here(request)
    }

    /// As [`ControlPlane::respond`], whoever has what it is about.
    pub(super) fn respond_here(&self, request: Request) -> Response {
        let _alone = request.is_alone().then(|| self.alone());
        let ready = self.records_for(&request).and_then(|()| {
            self.check_may_change(&request)?;
            Ok(request.moves().map(|name| self.hold(name)).transpose()?.flatten())
        });
        let _hold = match ready {
            Ok(hold) => hold,
            Err(error) => return protocol::failure(&error),
        };
        let result = match request {
            Request::Status => self.status().map(|status| Response::Status(Box::new(status))),
            Request::VolumeCreate {
                name,
                size_bytes,
                layout,
                export,
                fixed,
                checked_reads,
                compression,
                tiers,
                key,
                limit,
            } => {
                let compression = compression.unwrap_or_default();
                let how = How { layout, export, fixed, checked_reads, compression, tiers, key, limit };
                self.create(&name, size_bytes, how).map(Response::from)
            }
            Request::VolumeList => self.list().map(|volumes| Response::Volumes { volumes }),
            Request::VolumeShow { name } | Request::VolumeLive { name } => self.show(&name).map(Response::from),
            Request::VolumeExplain { name } => self.explain(&name),
            Request::VolumeSlow { name } => self.why_slow(&name),
            Request::VolumeResize { name, size_bytes, shrink, force } => {
                self.resize(&name, size_bytes, (shrink, force)).map(Response::from)
            }
            Request::VolumeSet { name, layout, fixed, checked_reads, compression, tiers, limit, sharing } => {
                let (layout, limit, sharing) = (layout.as_deref(), limit.as_deref(), sharing.as_deref());
                let change = ToSet { layout, fixed, checked_reads, compression, tiers, limit, sharing };
                self.set(&name, change).map(Response::from)
            }
            Request::SharingCreate { name, layout, compression, key } => {
                self.create_store(&name, &layout, compression, key.as_ref()).map(Response::from)
            }
            Request::VolumeSchedule { name, schedule } => {
                self.set_schedule(&name, schedule.as_ref()).map(|()| Response::Done)
            }
            Request::VolumeDelete { name, force, now } => self.delete(&name, (force, now)).map(|()| Response::Done),
            Request::TrashList => self.list_trash().map(|trash| Response::Trash { trash }),
            Request::TrashRestore { volume, name } => self.restore(&volume, name.as_deref()).map(Response::from),
            Request::TrashEmpty { volume } => {
                self.empty_trash(volume.as_deref()).map(|names| Response::Names { names })
            }
            Request::VolumeRename { name, new } => self.rename(&name, &new).map(Response::from),
            Request::VolumeProtect { name, protected } => self.protect(&name, protected).map(Response::from),
            Request::AlertsTest => self.test_alerts().map(|arrivals| Response::Alerts { arrivals }),
            Request::AuthorityGive { to } => self.give_authority(&to).map(|()| Response::Done),
            Request::VolumeExport { name, takeover, multipath, key, shared, failover } => {
                let named = key.map_or(Ok(()), |key| self.keys.name_source(&self.catalog.find(&name)?, &key));
                let exported = named.and_then(|()| match multipath {
                    true => self.export_multipath(&name),
                    false => self.export(&name, takeover),
                });
                exported.and_then(|_| self.set_export(&name, shared, failover)).map(Response::from)
            }
            Request::VolumeClients { name, change } => self.set_clients(&name, &change).map(Response::from),
            Request::VolumeHandover { name, to } => self.hand_over(&name, &to).map(Response::from),
            Request::VolumeRekey { name, key } => self.rekey(&name, &key).map(Response::from),
            Request::VolumeFilterAdd { name, spec } => self.add_filter(&name, &spec).map(Response::from),
            Request::VolumeFilterRemove { name, filter } => self.remove_filter(&name, filter).map(Response::from),
            Request::VolumeUnexport { name, force } => self.unexport(&name, force).map(Response::from),
            Request::SnapshotCreate { volume, name } => self.snapshot(&volume, &name).map(Response::from),
            Request::SnapshotGroup { volumes, name } => {
                self.snapshot_group(&volumes, &name).map(|volumes| Response::Volumes { volumes })
            }
            Request::SnapshotDelete { volume, name } => {
                self.change(&volume, Wanted::DropSnapshot { name }).map(|()| Response::Done)
            }
            Request::SnapshotRollback { volume, name } => self.roll_back(&volume, &name).map(Response::from),
            Request::VolumeClone { source, name, size_bytes, separate: true, export } => {
                self.clone_separately(&source, &name, size_bytes, export).map(Response::from)
            }
            Request::VolumeClone { source, name, size_bytes, .. } => {
                self.clone_snapshot(&source, &name, size_bytes).map(Response::from)
            }
            Request::SendBegin { volume, snapshot, from, start } => {
                let begin = self.send_begin(&volume, &snapshot, from.as_deref(), start);
                begin.map(|begin| Response::Begin(Box::new(begin)))
            }
            Request::ReceiveBegin { name, begin, layout } => self.receive_begin(&name, &begin, layout.as_deref()),
            Request::ReceiveProgress { name, ticket, offset } => {
                self.receive_progress(&name, &ticket, offset).map(|()| Response::Done)
            }
            Request::ReceiveEnd { name, ticket, complete } => {
                self.receive_end(&name, &ticket, complete).map(|()| Response::Done)
            }
            Request::ReceiveAbandon { name } => self.receive_abandon(&name).map(|()| Response::Done),
            Request::ReceiveState { name } => self.receive_state(&name).map(|token| Response::Resume { token }),
            Request::DeviceReplace { device, path, force } => self.replace_device(&device, path, force),
            Request::DeviceRemove { device, force } => self.remove_device(&device, force),
            Request::Drain { devices, cancel, force } => self.drain(&devices, cancel, force).map(|()| Response::Done),
            Request::DeviceClass { device, class } => self.set_class(&device, class).map(|()| Response::Done),
            Request::CheckRemovable { devices, force } => {
                self.check_removable(&devices, force).map(|()| Response::Done)
            }
            Request::CheckStop { node } => self.check_stop(node).map(|()| Response::Done),
            Request::MayStop { node } => self.may_stop(node),
            Request::CheckDown { nodes } => self.check_down(&nodes).map(|()| Response::Done),
            Request::GridReload => self.reload().map(|()| Response::Done),
            Request::TlsRevoke { list } => self.revoke(&list).map(|()| Response::Done),
            Request::Metadata => {
                let file =
                    metadata::all_records(&self.meta).map(|held| metadata::file_of(&self.config().grid, &held, true));
                file.map(|file| Response::Metadata { file: Box::new(file) })
            }
            Request::Tasks => self.all_tasks(),
            Request::GridSpace => self.space_of_all(),
            Request::Room { layout } => self.room(layout.as_deref()).map(|room| Response::Room(Box::new(room))),
            Request::Qos => self.qos().map(|qos| Response::Qos(Box::new(qos))),
            Request::QosMeasured { iops, nodes } => {
                self.note_measured(iops, nodes).map(|qos| Response::Qos(Box::new(qos)))
            }
            Request::Machines => self.machines().map(|machines| Response::Machines { machines }),
            Request::MachineAnnounce { name, seconds } => self.announce(&name, seconds).map(|()| Response::Done),
            Request::MachineRemove { name, dead, accept_loss } => self.remove_machine(&name, dead, accept_loss),
            Request::NodeCut { node } => self.cut(node, true).map(|()| Response::Done),
            Request::NodeMend { node } => self.cut(node, false).map(|()| Response::Done),
        };
        result.unwrap_or_else(|error| protocol::failure(&error))
    }

    /// What others have written by now is known, for who asks for more than a look at how things stand.
    fn records_for(&self, request: &Request) -> Result<()> {
        match request {
            // What is known is told at once, whatever the store is like.
            Request::Status | Request::Tasks => Ok(()),
            // It is told that the store could not be asked, beside what is known.
            _ if request.kind() == Kind::Look => {
                let _ = self.sync_if_right();
                Ok(())
            }
            _ => self.records.sync(),
        }
    }

    /// A store that is known to be silent is not waited for.
    fn sync_if_right(&self) -> Result<()> {
        match self.store_trouble() {
            None => self.records.sync(),
            Some(trouble) => refuse!(Code::Unavailable, "the metadata store is {trouble}"),
        }
    }

    /// That the store is out of reach, or not believed, and why: goes on after "is".
    pub(super) fn store_trouble(&self) -> Option<String> {
        let doubt = self.records.doubt();
        let doubt =
            doubt.map(|doubt| format!("not believed: {doubt}. Data is served on; nothing that it decides happens"));
        self.health.trouble().or(doubt)
    }

    /// Nothing else is begun about the volume until this is dropped.
    pub(super) fn hold(&self, name: &str) -> Result<Option<Hold>> {
        // What isn't there is told of by whoever looks for it.
        let Ok(entry) = self.catalog.find(name) else { return Ok(None) };
        self.assignment.hold(entry.root.volume).map(Some)
    }

    fn check_may_change(&self, request: &Request) -> Result<()> {
        request.disturbs().iter().try_for_each(|name| self.check_no_stream(name))?;
        request.needs_guests().iter().try_for_each(|name| self.check_no_store(name))?;
        request.of_one_host().iter().try_for_each(|name| match self.catalog.find(name) {
            Ok(entry) => self.catalog.check_not_elsewhere(&entry),
            // What isn't there is told of by whoever looks for it.
            Err(_) => Ok(()),
        })
    }

    /// The lock guards no data: after a panic it is as good as before.
    pub(super) fn alone(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn alone_at_access(&self) -> MutexGuard<'_, ()> {
        self.access.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn alone_at_peer_queries(&self) -> MutexGuard<'_, ()> {
        self.peer_queries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // What these locks guard is replaced whole: after a panic it is as good as before.

    pub(super) fn config(&self) -> GridConfig {
        self.config.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_config(&self, config: GridConfig) {
        self.stewardship.set_places(config.devices());
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = config;
    }

    pub(super) fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn history(&self) -> MutexGuard<'_, TaskHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn shared_told(&self) -> MutexGuard<'_, Option<BTreeSet<VolumeId>>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forecast(&self) -> MutexGuard<'_, Forecast> {
        self.forecast.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T> {
        ask(&self.reactors, ANSWER_MAX, command)
    }

    /// Tells the reactors what this host offers together with others.
    pub(super) fn offer(&self, offered: Offered) -> Result<()> {
        await_answer(ANSWER_MAX, |answer| self.reactors.offer(offered, answer))
    }

    /// Has the host do something that takes no time of its own.
    pub(super) fn order(&self, order: Order) -> Result<Outcome> {
        self.order_within(ANSWER_MAX, order)
    }

    pub(super) fn order_within(&self, patience: Duration, order: Order) -> Result<Outcome> {
        ask(&self.reactors, patience, |answer| Command::Order { order: Box::new(order), answer })
    }

    /// What volumes in service here lack.
    pub(super) fn inspect(&self, question: Question) -> Result<Vec<Weakness>> {
        let weak = self.order(Order::Inspect(question))?.inspected();
        Ok(weak.into_iter().map(Weakness::from).collect())
    }

    pub(super) fn status(&self) -> Result<HostStatus> {
        let mut live: LiveStatus = self.ask(|answer| Command::Status { answer })?;
        // Of records that can't be read whoever needs them tells.
        let _ = self.place_nodes(&mut live);
        let config = self.config();
        let own = process::own_stats().unwrap_or_default();
        let mut volumes = live.volumes;
        // Who only wants to know how things stand does not wait for the store: records are told as they are known.
        let told = self.report_of_catalog(&mut volumes);
        let metadata_trouble =
            self.store_trouble().or(told.as_ref().err().map(|error| format!("out of reach now: {error:#}")));
        let CatalogReport { deleting, unreadable, trash } = told.unwrap_or_default();
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(HostStatus {
            grid: config.grid,
            host: config.host.name,
            pid: std::process::id(),
            uptime_ms: live.uptime.as_millis() as u64,
            cpu_ms: own.cpu().as_millis() as u64,
            packing_cpu_ms: live.packing_cpu.as_millis() as u64,
            packing: self.packing_info(live.packing),
            resident_bytes: own.resident_bytes,
            metadata_trouble,
            alert_troubles: self.alert_troubles.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            days_to_full: self.days_to_full(&live.nodes, &volumes),
            longest_turn: live.longest_turn,
            crossings: self.reactors.crossings(),
            nodes: live.nodes,
            volumes,
            deleting,
            trash,
            unreadable,
            found: self.catalog.found().unwrap_or_default(),
            next_node: self.catalog.next_node().unwrap_or_default(),
            other_hosts: self.other_hosts(),
            hosts_gone: self.hosts_gone().unwrap_or_default(),
            announced: self.announced().unwrap_or_default(),
        })
    }

    fn packing_info(&self, figures: PackingFigures) -> PackingInfo {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u128;
        let of_machine = figures.recent.as_micros().max(1) * cores;
        PackingInfo {
            recent_per_mille: (figures.recent_cpu.as_micros() * 1000 / of_machine) as u64,
            share_percent: self.settings.packing_percent,
            ns_per_block: figures.block_cost.as_nanos() as u64,
            refused_bytes: figures.refused_blocks * BLOCK_BYTES as u64,
        }
    }

    /// Adds volumes that are not open here, and takes those away that are in the trash.
    fn report_of_catalog(&self, volumes: &mut Vec<VolumeInfo>) -> Result<CatalogReport> {
        let deleting = self.catalog.deleting()?.into_iter().map(|r| r.name).collect();
        let (lists, limits) = (self.catalog.clients()?, self.catalog.limits()?);
        let (trash, more) = self.trash_of(volumes)?;
        let (entries, mut unreadable) = self.catalog.survey()?;
        unreadable.extend(more);
        let open: BTreeMap<String, usize> = volumes.iter().enumerate().map(|(at, v)| (v.name.clone(), at)).collect();
        let schedules: BTreeMap<VolumeId, ScheduleRecord> = self.catalog.schedules()?.into_iter().collect();
        for entry in entries {
            let schedule = schedules.get(&entry.id()).map(schedule_info);
            match open.get(entry.name()) {
                Some(at) => {
                    let volume = &mut volumes[*at];
                    (volume.protected, volume.failover) = (entry.protected, entry.failover);
                    volume.schedule = schedule;
                    volume.offered_by = entry.offered_by.into_iter().collect();
                }
                None => {
                    let (only_for, limit) = (lists.get(&entry.id()).cloned(), limits.get(&entry.id()).cloned());
                    volumes.push(VolumeInfo { only_for, limit, schedule, ..self.closed_info(&entry) })
                }
            }
        }
        Ok(CatalogReport { deleting, trash, unreadable })
    }

    fn list(&self) -> Result<Vec<VolumeInfo>> {
        Ok(self.status()?.volumes)
    }

    fn explain(&self, name: &str) -> Result<Response> {
        let volume = Box::new(self.show(name)?);
        let parts = self.ask(|answer| Command::Anatomy { name: name.to_string(), answer })?;
        Ok(Response::Explained { volume, parts })
    }

    pub(super) fn show(&self, name: &str) -> Result<VolumeInfo> {
        let entry = self.catalog.find(name)?;
        let live = self.ask(|answer| Command::Volume { name: name.to_string(), answer })?;
        let mut info = live.unwrap_or_else(|| self.closed_info(&entry));
        info.offered_by = entry.offered_by.iter().cloned().collect();
        (info.protected, info.failover) = (entry.protected, entry.failover);
        info.only_for = self.catalog.clients()?.remove(&entry.id());
        info.limit = self.catalog.limits()?.remove(&entry.id());
        info.schedule = self.catalog.schedule(entry.id())?.as_ref().map(schedule_info);
        if entry.clone.is_none() {
            (info.shares_with, info.needed_by) = self.catalog.kin_known(&entry.root)?;
            info.sharing = self.catalog.store_known(&entry.root)?;
            info.leaves_domain = entry.is_leaving();
        }
        info.warning = self
            .store_trouble()
            .map(|trouble| format!("the metadata store is {trouble}. This is what the host of this machine knows"));
        Ok(info)
    }

    fn create(&self, name: &str, size_bytes: u64, how: How) -> Result<VolumeInfo> {
        let How { layout, export, fixed: is_fixed, checked_reads, compression, tiers, key, limit } = how;
        let (layout, key) = (layout.as_str(), key.as_ref());
        let limit = limit.as_deref().map(limits::parse).transpose()?.flatten();
        // A floor is promised to a volume that is there.
        limit.as_ref().map_or(Ok(()), |limit| self.check_new_floor(limit))?;
        let floor = limit.clone().filter(|limit| limits::floor_of_record(limit).is_some());
        let limit = limit.and_then(limits::without_floor);
        check_size(size_bytes)?;
        let layout = self.check_layout(layout)?;
        check_tiers(tiers, layout, size_bytes, Code::Invalid)?;
        self.check_media(layout, tiers)?;
        let left_bytes = owned_bytes(size_bytes);
        self.drop_orphan(name)?;
        let reservation = is_fixed.then_some(Reservation { base_bytes: 0, left_bytes });
        self.check_compression(compression)?;
        let settings = Settings { reservation, unchecked_reads: !checked_reads, compression, ..Settings::default() };
        let settings = (settings, limit.as_ref());
        let key = key.map(NewKey::make).transpose()?;
        let what = What::guests(size_bytes, layout, tiers);
        let make = |reserving: Option<&Reserving>| self.catalog.create(name, what, settings, key.as_ref(), reserving);
        let entry = if is_fixed {
            let (of, owned) = (format!("volume {name}"), (layout, left_bytes));
            self.set_aside(&of, None, owned, |reserving| make(Some(reserving)))?
        } else {
            make(None)?.expect("nothing is set aside for it")
        };
        let mut warning = None;
        if let Some(key) = &key {
            self.keys.on_made(entry.root.volume, key)?;
            warning = self.key_warning(name, layout);
        }
        if is_fixed {
            self.set_reservation_anew(&entry)?;
        }
        floor.as_ref().map_or(Ok(()), |limit| self.set_limit(&entry, Some(limit)))?;
        let limit = floor.or(limit).map(|record| limits::words_of(Ok(record)));
        let made = if export { self.export(name, false)? } else { VolumeInfo { limit, ..self.closed_info(&entry) } };
        Ok(VolumeInfo { warning, ..made })
    }

    pub(super) fn check_layout(&self, layout: &str) -> Result<Layout> {
        let layout: Layout = read(layout)?;
        let by_node: Vec<usize> = self.config().nodes.iter().map(|node| node.devices.len()).collect();
        let Some((wants, has)) = protect::lacks(layout, &by_node) else { return Ok(layout) };
        match protect::choose(Protect::Node, &by_node).or_else(|_| protect::choose(Protect::Device, &by_node)) {
            Ok(fits) => refuse!(
                Code::Redundancy,
                "layout {layout} wants {wants} and this grid has {has}; choose another, for example {fits} \
                 (`holdfast volume plan` shows what there is)"
            ),
            Err(why) => refuse!(Code::Redundancy, "layout {layout} wants {wants} and this grid has {has}; {why}"),
        }
    }

    fn set(&self, name: &str, change: ToSet<'_>) -> Result<VolumeInfo> {
        let entry = self.catalog.find(name)?;
        let ToSet { layout, fixed, checked_reads, compression, tiers, limit, sharing } = change;
        let limit = limit.map(limits::parse).transpose()?;
        let is_its_own = ToSet { limit: None, ..change } == ToSet::default();
        if entry.clone.is_some() && !is_its_own {
            refuse!(
                Code::State,
                "{name} is a clone, a part of volume {0}; `holdfast volume set {0}` changes both",
                entry.root.name
            );
        }
        if layout.is_some() || tiers.is_some() || fixed == Some(true) {
            check_stays(&entry)?;
        }
        let layout = layout.map(|layout| self.check_layout(layout)).transpose()?;
        let root = &entry.root;
        if let Some(compression) = compression {
            self.check_compression(compression)?;
            if compression != Compression::Off {
                let features = root.features.clone().with(Feature::Packed);
                self.catalog.check_can_serve(&Root { features, ..root.clone() })?;
            }
        }
        let becomes = (layout.unwrap_or(root.layout), tiers.unwrap_or(root.tiers));
        if becomes != (root.layout, root.tiers) {
            check_tiers(becomes.1, becomes.0, entry.size_bytes(), Code::State)?;
            self.check_media(becomes.0, becomes.1)?;
            self.catalog.check_can_serve(&Root { layout: becomes.0, tiers: becomes.1, ..root.clone() })?;
        }
        if let Some(layout) = layout {
            let become_so = || self.set_policy(name, Policy::Layout(layout));
            self.become_fixed(&entry, entry.size_bytes(), layout, become_so)?;
        }
        if let Some(tiers) = tiers {
            self.set_policy(name, Policy::Tiers(tiers))?;
        }
        if let Some(compression) = compression {
            self.set_policy(name, Policy::Compression(compression))?;
            self.catalog.change_settings(root.volume, |settings| settings.compression = compression)?;
        }
        if let Some(fixed) = fixed {
            self.set_provisioning(&self.catalog.find(name)?, fixed)?;
        }
        if let Some(checked) = checked_reads {
            self.catalog.change_settings(entry.root.volume, |settings| settings.unchecked_reads = !checked)?;
            self.order(Order::CheckReads { name: name.to_string(), checked })?;
        }
        if let Some(limit) = limit {
            self.set_limit(&entry, limit.as_ref())?;
        }
        match sharing {
            Some(NO_DOMAIN) => self.end_sharing(&self.catalog.find(name)?)?,
            Some(store) => self.share_by(&self.catalog.find(name)?, store)?,
            None => {}
        }
        self.show(name)
    }

    /// Refuses what nodes of an older release leave no room for.
    pub(super) fn check_compression(&self, compression: Compression) -> Result<()> {
        if compression == Compression::Off { Ok(()) } else { check_nodes_pack(&self.live()?.nodes) }
    }

    /// Whether nodes have devices enough of the classes of media that tiers name.
    fn check_media(&self, layout: Layout, tiers: Tiers) -> Result<()> {
        let first = tiers.first.map(|first| (first.layout, first.media));
        let named = tiers.capacity.map(|media| (layout, Some(media))).into_iter().chain(first);
        for (layout, media) in named {
            let live = self.live()?;
            let is_of = |d: &&DeviceInfo| media.is_none() || d.class == media;
            let by_node: Vec<usize> = live.nodes.iter().map(|n| n.devices.iter().filter(is_of).count()).collect();
            if let Some((wants, has)) = protect::lacks(layout, &by_node) {
                let Some(media) = media else {
                    refuse!(Code::Redundancy, "layout {layout} wants {wants}, and this grid has {has}")
                };
                refuse!(
                    Code::Redundancy,
                    "layout {layout} on {media} wants {wants}, and this grid has {has} of that class; `holdfast device list` \
                     shows the classes of devices, and `holdfast device class` sets them"
                );
            }
        }
        Ok(())
    }

    fn set_policy(&self, name: &str, policy: Policy) -> Result<()> {
        let order = Order::SetPolicy { name: name.to_string(), policy };
        match self.order_within(RESIZE_MAX, order).map(Outcome::was) {
            Ok(true) => Ok(()),
            Ok(false) => {
                refuse!(Code::State, "volume {name} is not in service; `holdfast volume export {name}`, then try again")
            }
            Err(error) => {
                Err(error.context(format!("the policy of volume {name} is not changed yet; it may still be")))
            }
        }
    }

    pub(super) fn export(&self, name: &str, takeover: bool) -> Result<VolumeInfo> {
        let entry = self.catalog.find(name)?;
        self.check_no_stream(name)?;
        let spec = self.keys.spec_of(&entry)?;
        if self.catalog.claim_export(&entry, takeover)? {
            // What is left here of an earlier service knows nothing of what happened since.
            self.close_now(name, (true, true))?;
        }
        self.take_in_access()?;
        // As long as it is to be served here.
        let open = || match self.catalog.find(name)? {
            entry if self.catalog.is_here(&entry) => {
                let spec = OpenSpec { guard: Some(entry.export_version), ..spec.clone() };
                self.order(Order::Open { spec, exported: true }).map(drop)
            }
            _ => Ok(()),
        };
        open()?;
        let (patience, mut again) = (Instant::now() + OPEN_MAX, Instant::now() + OPEN_AGAIN);
        loop {
            let info = self.ask(|answer| Command::Volume { name: name.to_string(), answer })?;
            // Another opening was faster, the steward's say: while this command holds the volume nobody else tries again.
            let is_over = info.as_ref().is_none_or(|info| info.state == VolumeState::Deposed);
            if is_over && Instant::now() >= again {
                open()?;
                again = Instant::now() + OPEN_AGAIN;
            }
            match info {
                Some(info) if info.state == VolumeState::Open || Instant::now() >= patience => return Ok(info),
                // A clone is known when its volume is open.
                None if Instant::now() >= patience => {
                    refuse!(
                        Code::State,
                        "volume {name} is not served: the host is stopping, or has as many volumes open as it can"
                    );
                }
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn close_now(&self, name: &str, (force, discard): (bool, bool)) -> Result<CloseOutcome> {
        let order = Order::Close { name: name.to_string(), force, discard, only_care: false };
        Ok(self.order_within(CLOSE_MAX, order)?.closed())
    }

    /// Closes a volume that is open for care only.
    pub(super) fn end_care(&self, name: &str) -> Result<CloseOutcome> {
        let order = Order::Close { name: name.to_string(), force: false, discard: false, only_care: true };
        Ok(self.order_within(CLOSE_MAX, order)?.closed())
    }

    pub(super) fn close(&self, name: &str, force: bool, discard: bool, why_not: &str) -> Result<()> {
        let mut outcome = self.close_now(name, (force, discard))?;
        // A client that has just said good-bye is gone in a moment.
        let patience = Instant::now() + HANG_UP_MAX;
        while matches!(outcome, CloseOutcome::InUse(_)) && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(20));
            outcome = self.close_now(name, (force, discard))?;
        }
        match outcome {
            CloseOutcome::Closed | CloseOutcome::NotOpen => Ok(()),
            CloseOutcome::InUse(count) => {
                let clients = if count == 1 { "one client is" } else { "clients are" };
                refuse!(
                    Code::InUse,
                    "{why_not}: {clients} connected ({count}); disconnect first, or add --force to cut them off"
                )
            }
        }
    }

    pub(super) fn unexport(&self, name: &str, force: bool) -> Result<VolumeInfo> {
        let entry = self.catalog.find(name)?;
        if self.catalog.is_offered(&entry) && !self.catalog.is_here(&entry) && entry.clone.is_none() {
            return self.end_offer(&entry, force);
        }
        self.catalog.check_not_elsewhere(&entry)?;
        if entry.clone.is_some() {
            refuse!(
                Code::State,
                "{name} is a clone, a part of volume {0}, and in service with it; `holdfast volume unexport {0}` takes \
                 both out",
                entry.root.name
            );
        }
        self.close(name, force, false, &format!("volume {name} stays exported"))?;
        self.catalog.end_export(entry.root.volume)?;
        self.note_all_reservations()?;
        Ok(self.closed_info(&self.catalog.find(name)?))
    }

    /// A volume is not made smaller under the hands of clients unless that is forced.
    pub(super) fn resize(&self, name: &str, size_bytes: u64, (shrink, force): (bool, bool)) -> Result<VolumeInfo> {
        check_size(size_bytes)?;
        let entry = self.catalog.find(name)?;
        if size_bytes < entry.size_bytes() && !shrink {
            refuse!(
                Code::State,
                "volume {name} has {} and would lose its end; shrink the file system on it first, then add --shrink",
                Size(entry.size_bytes())
            );
        }
        if let Some((id, record)) = entry.clone {
            self.change(name, Wanted::ResizeClone { size_bytes, force })?;
            self.catalog.set_clone(id, &CloneRecord { size_bytes, ..record })?;
            return self.show(name);
        }
        let live = self.ask(|answer| Command::Volume { name: name.to_string(), answer })?;
        if live.is_none() {
            // What a smaller size cuts off is discarded, which only an owner can do.
            self.export(name, false)?;
            let resized = self.resize(name, size_bytes, (shrink, force));
            self.unexport(name, false)?;
            resized?;
            return self.show(name);
        }
        let order = Order::Resize { name: name.to_string(), size_bytes, force };
        let become_so = || Ok(self.order_within(RESIZE_MAX, order).map(Outcome::resized));
        match self.become_fixed(&entry, size_bytes, entry.root.layout, become_so)? {
            Ok(ResizeOutcome::Done) => self.show(name),
            Ok(ResizeOutcome::InUse) => Err(self.larger_in_use(name)),
            Ok(ResizeOutcome::NotOpen) => refuse!(Code::Changed, "volume {name} was closed meanwhile; try again"),
            Err(error) => Err(error.context(format!("volume {name} is not resized yet; it will be once it is open"))),
        }
    }

    /// Why a volume is not made smaller: who would lose the end of it.
    fn larger_in_use(&self, name: &str) -> Error {
        let users = self.ask(|answer| Command::Users { name: name.to_string(), answer }).unwrap_or_default();
        let why = format!(
            "volume {name} stays as large as it is: clients are connected that know its size, and would get errors behind a \
             nearer end: {}. Disconnect them first; or add --force, and have them connect anew afterwards",
            users.join(", ")
        );
        holdfast_api::Error::new(Code::InUse, why).into()
    }

    fn snapshot(&self, volume: &str, name: &str) -> Result<VolumeInfo> {
        check_name(name)?;
        self.change(volume, Wanted::Snapshot { name: name.to_string(), created_ms: clock::wall_ms() })?;
        self.show(volume)
    }

    /// A clone that no record names: its making was cut short, or its deletion. Nobody can have used it.
    pub(super) fn drop_orphan(&self, name: &str) -> Result<()> {
        let found = self.ask(|answer| Command::Volume { name: name.to_string(), answer })?;
        if found.is_none_or(|found| found.clone_of.is_none()) || self.catalog.find(name).is_ok() {
            return Ok(());
        }
        let wanted = Wanted::DropClone { force: true };
        match self.order_within(CHANGE_MAX, Order::Change { volume: name.to_string(), wanted })?.changed() {
            ChangeOutcome::Done => Ok(()),
            other => {
                refuse!(Code::Changed, "what is left of an earlier {name} can't be deleted now ({other:?}); try again")
            }
        }
    }

    pub(super) fn change(&self, volume: &str, wanted: Wanted) -> Result<()> {
        let entry = self.catalog.find(volume)?;
        if let Wanted::Snapshot { .. } = wanted {
            return self.snapshot_fixed(&entry, || self.do_change(&entry, wanted.clone()));
        }
        self.do_change(&entry, wanted)
    }

    fn do_change(&self, entry: &Entry, wanted: Wanted) -> Result<()> {
        let volume = entry.name();
        let is_resize = matches!(wanted, Wanted::ResizeClone { .. });
        let order = Order::Change { volume: volume.to_string(), wanted: wanted.clone() };
        match self.order_within(CHANGE_MAX, order)?.changed() {
            ChangeOutcome::Done => Ok(()),
            ChangeOutcome::NotOpen => {
                let origin = &entry.root.name;
                refuse!(
                    Code::State,
                    "volume {volume} is not in service; `holdfast volume export {origin}`, then try again"
                )
            }
            ChangeOutcome::InUse(_) if is_resize => Err(self.larger_in_use(volume)),
            ChangeOutcome::InUse(count) => {
                let clients = if count == 1 { "one client is" } else { "clients are" };
                refuse!(Code::InUse, "nothing is changed: {clients} connected ({count}); disconnect first")
            }
            ChangeOutcome::Refused(why) => {
                let code = self.refusal_of(volume, &wanted);
                refuse!(code, "{why}; `holdfast snapshot list {volume}` shows what there is")
            }
        }
    }

    /// What kind of thing stood in the way of a change, whose text is for people.
    fn refusal_of(&self, volume: &str, wanted: &Wanted) -> Code {
        let live = self.show(volume).ok().and_then(|info| info.live);
        let has = |name: &String| live.as_ref().is_some_and(|live| live.snapshots.iter().any(|s| s.name == *name));
        match wanted {
            Wanted::Snapshot { name, .. } if has(name) => Code::Exists,
            Wanted::DropSnapshot { name } | Wanted::Rollback { snapshot: name } if !has(name) => Code::NotFound,
            Wanted::Clone { snapshot, .. } if !has(snapshot) => Code::NotFound,
            _ => Code::State,
        }
    }

    pub(super) fn roll_back(&self, volume: &str, name: &str) -> Result<VolumeInfo> {
        let before = self.show(volume)?;
        let snapshots = before.live.as_ref().map_or(&[][..], |live| &live.snapshots);
        let then_bytes = snapshots.iter().find(|s| s.name == name).map_or(before.size_bytes, |s| s.size_bytes);
        if then_bytes > before.size_bytes {
            self.resize(volume, then_bytes, (false, false))?;
        }
        self.change(volume, Wanted::Rollback { snapshot: name.to_string() })?;
        if then_bytes < before.size_bytes {
            // Nobody is connected who has seen more than the snapshot has: rolling back has made sure of that.
            self.resize(volume, then_bytes, (true, true))?;
        }
        self.show(volume)
    }

    /// A clone that a crash left without its record is dropped by the next attempt, which may be for another one.
    fn clone_snapshot(&self, source: &str, name: &str, size_bytes: Option<u64>) -> Result<VolumeInfo> {
        let (volume, Some(snapshot)) = split_export(source) else {
            refuse!(
                Code::State,
                "{source} is a volume, and clones are made of snapshots; `holdfast snapshot create {source} NAME`, then \
                 `holdfast volume clone {source}@NAME {name}`"
            );
        };
        size_bytes.map_or(Ok(()), check_size)?;
        let entry = self.catalog.find(volume)?;
        if entry.settings.reservation.is_some() {
            refuse!(
                Code::State,
                "volume {volume} is fixed, and a clone would write to what is set aside for it; `holdfast volume set \
                 {volume} --provisioning thin`, then try again"
            );
        }
        self.drop_orphan(name)?;
        let id = self.catalog.begin_clone(name, entry.root.volume)?;
        self.inherit_access(&entry, id)?;
        let wanted = Wanted::Clone { snapshot: snapshot.to_string(), id, name: name.to_string(), size_bytes };
        self.change(volume, wanted)?;
        let made = self.ask(|answer| Command::Volume { name: name.to_string(), answer })?;
        let made = made.with_context(|| format!("volume {volume} was closed meanwhile; try again"))?;
        let record = CloneRecord::new(name, entry.root.volume, made.size_bytes);
        self.catalog.set_clone(id, &record)?;
        Ok(made)
    }

    fn delete(&self, name: &str, (force, now): (bool, bool)) -> Result<()> {
        let entry = self.catalog.find(name)?;
        if entry.protected {
            refuse!(
                Code::Protected,
                "{name} is protected, and is not deleted; `holdfast volume protect {name} off`, then try again"
            );
        }
        if let Some((id, record)) = &entry.clone {
            let origin = self.ask(|answer| Command::Volume { name: entry.root.name.clone(), answer })?;
            let clone = self.ask(|answer| Command::Volume { name: name.to_string(), answer })?;
            // Where its volume is open and has it no more an earlier deletion was cut short.
            let is_gone =
                origin.is_some_and(|v| v.state == VolumeState::Open) && clone.is_none_or(|c| c.id != id.to_string());
            if !is_gone {
                self.change(name, Wanted::DropClone { force })?;
            }
            return self.catalog.forget_clone(*id, &record.name);
        }
        let clones = self.catalog.clones_of(entry.root.volume)?;
        if !clones.is_empty() {
            refuse!(Code::InUse, "volume {name} has clones ({}); delete them first", clones.join(", "));
        }
        let by = self.catalog.needed_by(&entry.root)?;
        if !by.is_empty() {
            return Err(StillNeeded { volume: name.to_string(), by: by.join(", ") }.into());
        }
        let is_begun = self.catalog.deleting()?.iter().any(|of| of.volume == entry.root.volume.to_string());
        if !now && !is_begun {
            return self.throw_away(&entry, force);
        }
        self.close(name, force, true, &format!("volume {name} is not deleted"))?;
        self.catalog.begin_deleting(&entry)?;
        self.delete_for_good(entry.root.volume)
    }

    /// It answers, and is the one that it was: of another nothing is believed, and what can wait is not tried.
    pub(super) fn store_is_right(&self) -> bool {
        self.health.trouble().is_none() && self.records.doubt().is_none()
    }

    fn cut(&self, node: u32, cut: bool) -> Result<()> {
        self.config().node(node)?;
        match self.ask(|answer| Command::Cut { node: NodeId(node), cut, answer })? {
            true => Ok(()),
            false => refuse!(
                Code::NotFound,
                "the host knows no node {node}; restart the grid with `holdfast grid down` and `grid up`"
            ),
        }
    }

    /// Whether nobody serves a volume that is to be served, nor will without being told.
    fn is_orphaned(&self, entry: &Entry) -> bool {
        !entry.failover
            && self.records.view(|view| {
                let mut could = entry.served_by.iter().chain(&entry.offered_by);
                !could.any(|host| view.has_host(host))
            })
    }

    /// What such a volume waits for, whose host says nothing to the metadata store.
    fn fails_over_when(&self, entry: &Entry) -> Option<String> {
        let host = entry.served_by.as_ref().filter(|_| entry.failover && entry.clone.is_none())?;
        let is_gone = !self.records.view(|view| view.has_host(host));
        is_gone.then(|| {
            let has_key = if entry.root.key_id.is_some() { ", and that can get its key" } else { "" };
            format!(
                "its host {host} says nothing to the metadata store; a host that reaches the volume's nodes{has_key} takes it over \
                 once those hear no more of {host}"
            )
        })
    }

    /// What is said of a volume with its export, as far as it is.
    fn set_export(&self, name: &str, shared: Option<bool>, failover: Option<bool>) -> Result<VolumeInfo> {
        if let Some(failover) = failover {
            let entry = self.catalog.find(name)?;
            self.catalog.change_export(entry.root.volume, |export| export.failover = failover)?;
        }
        if let Some(shared) = shared {
            self.set_shared(&self.catalog.find(name)?, shared)?;
        }
        self.show(name)
    }

    /// A volume that is not in service here.
    pub(super) fn closed_info(&self, entry: &Entry) -> VolumeInfo {
        let elsewhere = entry.served_by.is_some() && !self.catalog.is_here(entry);
        let trouble = self.keys.trouble(entry.root.volume).filter(|_| !elsewhere);
        let state = match trouble {
            _ if elsewhere && self.catalog.is_offered(entry) => VolumeState::Forwarding,
            _ if elsewhere => VolumeState::Elsewhere,
            Some(_) => VolumeState::Locked,
            None => VolumeState::Closed,
        };
        let reservation = entry.settings.reservation.filter(|_| entry.clone.is_none());
        let reservation = reservation.map(|reservation| ReservedVolume::new(entry.root.layout, reservation));
        VolumeInfo {
            name: entry.name().to_string(),
            id: entry.id().to_string(),
            clone_of: entry.clone.as_ref().map(|_| entry.root.name.clone()),
            size_bytes: entry.size_bytes(),
            layout: entry.root.layout.to_string(),
            tiers: entry.root.tiers,
            provisioning: provisioning_of(reservation.is_some()),
            set_aside_bytes: reservation.map_or(0, |reservation| reservation.set_aside_bytes()),
            integrity: integrity_of(!entry.settings.unchecked_reads),
            compression: entry.settings.compression.to_string(),
            encrypted: entry.root.key_id.is_some(),
            exported: entry.served_by.is_some(),
            protected: entry.protected,
            schedule: None,
            shared: entry.shared,
            failover: entry.failover,
            writer: None,
            refused_writer: None,
            shares_with: None,
            is_store: entry.root.is_store(),
            sharing: None,
            leaves_domain: false,
            needed_by: Vec::new(),
            host: entry.served_by.clone(),
            orphaned: elsewhere && self.is_orphaned(entry),
            offered_by: entry.offered_by.iter().cloned().collect(),
            only_for: None,
            limit: None,
            state,
            waits: trouble.or_else(|| self.fails_over_when(entry)),
            warning: None,
            epoch: entry.root.epoch.0,
            uris: self.offer_uris(entry),
            filters: None,
            sessions: if elsewhere && self.catalog.is_offered(entry) { self.clients_through(entry) } else { 0 },
            live: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_can_not_be_let_in_takes_no_processor() {
        let (mut came, mut paused) = (0, 0);
        let accept = || {
            came += 1;
            if came < 4 { Err(std::io::Error::from_raw_os_error(24)) } else { Ok(came) }
        };
        assert_eq!(next(accept, || paused += 1), 4);
        assert_eq!(paused, 3, "each time that files were short");
    }
}
