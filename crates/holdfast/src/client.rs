//! The command line's end of the control socket.

use crate::grid::layout::GridDir;
use crate::grid::processes::Role;
use anyhow::{Context, Result, bail};
use holdfast_api::{
    AlertArrival, Code, Error, HostStatus, MachineInfo, Request, Response, TaskInfo, TrashInfo, VolumeInfo,
    VolumeSpace, refuse,
};
use holdfast_format::meta::MetadataFile;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long a client of a volume that has hung up may still be seen.
pub const HANG_UP_MAX: Duration = Duration::from_millis(500);

/// For what the host knows by heart.
pub const QUICK: Duration = Duration::from_millis(900);

/// For what the metadata store has to be asked for.
pub const UNHURRIED: Duration = Duration::from_secs(10);

/// For what waits for nodes or for a log to be emptied.
pub const PATIENT: Duration = Duration::from_secs(150);

/// Asks the host of the grid in `dir`.
pub fn ask(dir: &GridDir, request: &Request, patience: Duration) -> Result<Response> {
    if let Some(remote) = dir.remote() {
        return remote.ask(request, patience);
    }
    let path = dir.control_socket();
    // Who may not do all may perhaps look.
    let is_denied = |e: &std::io::Error| e.kind() == ErrorKind::PermissionDenied;
    let as_reader = |e| if is_denied(&e) { UnixStream::connect(dir.reader_socket()).map_err(|_| e) } else { Err(e) };
    let stream = match UnixStream::connect(&path).or_else(as_reader) {
        Ok(stream) => stream,
        Err(e) if is_denied(&e) => refuse!(
            Code::NotPermitted,
            "cannot reach the host at {}: {e}; run this command as the user that runs the host, or, to look only, be of the group \
             that its setting control.readers names (`holdfast config explain control.readers`)",
            path.display()
        ),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            dir.load()?;
            if let Some(why) = Role::Host.waits_for(dir) {
                refuse!(
                    Code::Unavailable,
                    "the host serves nothing yet: it waits for the grid's metadata ({why}), and goes on by itself"
                );
            }
            refuse!(
                Code::Unavailable,
                "the grid in {} is not running; start it with `holdfast grid up`",
                dir.root().display()
            );
        }
        Err(e) => return Err(e).with_context(|| format!("cannot reach the host at {}", path.display())),
    };
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    let mut line = serde_json::to_string(request).expect("our requests always encode");
    line.push('\n');
    (&stream).write_all(line.as_bytes()).map_err(|e| silent(&e, patience))?;
    let mut answer = String::new();
    BufReader::new(&stream).read_line(&mut answer).map_err(|e| silent(&e, patience))?;
    if answer.is_empty() {
        refuse!(
            Code::Unavailable,
            "the host stopped before it answered; look into {}",
            dir.logs_dir().join("host.log").display()
        );
    }
    match serde_json::from_str(&answer).context("the host's answer makes no sense: is it another release?")? {
        Response::Error { message, code } => Err(Error::new(code, message).into()),
        response => Ok(response),
    }
}

fn silent(error: &std::io::Error, patience: Duration) -> Error {
    let why = match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => format!(
            "the host does not answer within {:.1} s; `holdfast grid status` shows whether its process is stopped",
            patience.as_secs_f64()
        ),
        _ => format!("the connection to the host broke: {error}; `holdfast grid status` shows its process"),
    };
    Error::new(Code::Unavailable, why)
}

pub fn status(dir: &GridDir) -> Result<HostStatus> {
    match ask(dir, &Request::Status, QUICK)? {
        Response::Status(status) => Ok(*status),
        other => unexpected(&other),
    }
}

pub fn test_alerts(dir: &GridDir) -> Result<Vec<AlertArrival>> {
    match ask(dir, &Request::AlertsTest, PATIENT)? {
        Response::Alerts { arrivals } => Ok(arrivals),
        other => unexpected(&other),
    }
}

pub fn volume(dir: &GridDir, request: &Request) -> Result<VolumeInfo> {
    let patience =
        if matches!(request, Request::VolumeShow { .. } | Request::VolumeLive { .. }) { UNHURRIED } else { PATIENT };
    match ask(dir, request, patience)? {
        Response::Volume(volume) => Ok(*volume),
        other => unexpected(&other),
    }
}

/// What goes on in the grid, and hosts that don't say what they do.
pub fn tasks(dir: &GridDir) -> Result<(Vec<TaskInfo>, Vec<String>)> {
    match ask(dir, &Request::Tasks, UNHURRIED)? {
        Response::Tasks { tasks, silent } => Ok((tasks, silent)),
        other => unexpected(&other),
    }
}

/// What open volumes hold, and hosts that don't say it of theirs.
pub fn space(dir: &GridDir) -> Result<(Vec<VolumeSpace>, Vec<String>)> {
    match ask(dir, &Request::GridSpace, UNHURRIED)? {
        Response::Space { volumes, silent } => Ok((volumes, silent)),
        other => unexpected(&other),
    }
}

pub fn machines(dir: &GridDir) -> Result<Vec<MachineInfo>> {
    match ask(dir, &Request::Machines, UNHURRIED)? {
        Response::Machines { machines } => Ok(machines),
        other => unexpected(&other),
    }
}

/// Why a node can't be stopped now, if so, and whether it never can.
pub fn why_not_stopped(dir: &GridDir, node: u32) -> Result<Option<(String, bool)>> {
    match ask(dir, &Request::MayStop { node }, PATIENT) {
        Ok(Response::MayStop { why, never }) => Ok(why.map(|why| (why, never))),
        Ok(other) => unexpected(&other),
        // A host of an older release is asked in its own words: it is restarted after its nodes.
        Err(error) if format!("{error:#}").contains("unknown variant") => {
            Ok(done(dir, &Request::CheckStop { node }).err().map(|why| (format!("{why:#}"), false)))
        }
        Err(error) => Err(error),
    }
}

pub fn volumes(dir: &GridDir) -> Result<Vec<VolumeInfo>> {
    match ask(dir, &Request::VolumeList, UNHURRIED)? {
        Response::Volumes { volumes } => Ok(volumes),
        other => unexpected(&other),
    }
}

/// A volume as its host tells of it.
pub fn live_volume(dir: &GridDir, name: &str) -> Result<VolumeInfo> {
    match volume(dir, &Request::VolumeLive { name: name.to_string() }) {
        // A host of an older release tells what it knows itself.
        Err(error) if format!("{error:#}").contains("unknown variant") => {
            volume(dir, &Request::VolumeShow { name: name.to_string() })
        }
        told => told,
    }
}

pub fn trash(dir: &GridDir) -> Result<Vec<TrashInfo>> {
    match ask(dir, &Request::TrashList, UNHURRIED)? {
        Response::Trash { trash } => Ok(trash),
        other => unexpected(&other),
    }
}

/// Names of what is gone for good.
pub fn empty_trash(dir: &GridDir, volume: Option<String>) -> Result<Vec<String>> {
    match ask(dir, &Request::TrashEmpty { volume }, PATIENT)? {
        Response::Names { names } => Ok(names),
        other => unexpected(&other),
    }
}

/// The members, with their snapshots.
pub fn snapshot_group(dir: &GridDir, request: &Request) -> Result<Vec<VolumeInfo>> {
    match ask(dir, request, PATIENT)? {
        Response::Volumes { volumes } => Ok(volumes),
        other => unexpected(&other),
    }
}

/// What the metadata store holds.
pub fn metadata(dir: &GridDir) -> Result<MetadataFile> {
    match ask(dir, &Request::Metadata, PATIENT)? {
        Response::Metadata { file } => Ok(*file),
        other => unexpected(&other),
    }
}

pub fn done(dir: &GridDir, request: &Request) -> Result<()> {
    match ask(dir, request, PATIENT)? {
        Response::Done => Ok(()),
        other => unexpected(&other),
    }
}

fn unexpected<T>(response: &Response) -> Result<T> {
    bail!("the host's answer does not fit the request ({response:?}): is it another release?")
}
