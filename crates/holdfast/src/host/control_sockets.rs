//! The control plane's sockets, and who may ask for what at which.
//!
//! ```text
//! DIR/control.sock    0600: whoever runs the host, and root; everything
//! DIR/reader.sock     0660, of the group that the setting `control.readers` names: what only looks
//! DIR/api.sock        the HTTP interface: 0600, or 0660 where there are readers
//! ```
//! The kernel checks who may connect: what is asked at the readers' socket is a reader's, whoever asks. By HTTP it is the
//! user at the other end who counts. Sockets get their modes before anybody can connect.

use crate::daemon::outwait;
use crate::grid::layout::GridDir;
use anyhow::{Context, Result};
use holdfast_api::{Code, Role, refuse};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Connections that the kernel keeps until a thread takes them.
const BACKLOG: i32 = 128;

const GROUPS: &str = "/etc/group";

/// The sockets that there are to be.
#[derive(Debug)]
pub struct Sockets {
    /// Of the command line.
    pub control: Vec<(UnixListener, Role)>,
    /// Of the HTTP interface.
    pub api: UnixListener,
}

pub fn open(dir: &GridDir, readers: Option<&str>) -> Result<Sockets> {
    let admins = open_one(&dir.control_socket(), 0o600, None)?;
    let path = dir.reader_socket();
    let Some(group) = readers else {
        // One of an earlier start.
        remove(&path)?;
        let api = open_one(&dir.api_socket(), 0o600, None)?;
        return Ok(Sockets { control: vec![(admins, Role::Admin)], api });
    };
    let groups = fs::read_to_string(GROUPS).with_context(|| format!("cannot read {GROUPS}"))?;
    let Some(number) = number_of(group, &groups) else {
        refuse!(
            Code::NotFound,
            "control.readers is {group}, and {GROUPS} has no such group; make it (`groupadd {group}`), or write the number of one \
             that is elsewhere"
        );
    };
    let for_readers = |path: &Path| {
        open_one(path, 0o660, Some(number)).with_context(|| {
        format!(
            "the socket for readers can't be opened; where it may not be given to group {group}, add the user that runs the host to \
             it, or let `holdfast grid units` write the service's unit anew"
        )
    })
    };
    let (readers, api) = (for_readers(&path)?, for_readers(&dir.api_socket())?);
    Ok(Sockets { control: vec![(admins, Role::Admin), (readers, Role::Reader)], api })
}

fn number_of(group: &str, groups: &str) -> Option<u32> {
    let named = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok()).flatten()
    });
    named.or_else(|| group.parse().ok())
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot replace {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn open_one(path: &Path, mode: u32, group: Option<u32>) -> Result<UnixListener> {
    let is_taken = || if UnixStream::connect(path).is_ok() { Err(()) } else { Ok(()) };
    if outwait(is_taken, |()| true).is_err() {
        refuse!(Code::InUse, "another host serves {}; stop it with `holdfast grid down`", path.display());
    }
    remove(path)?;
    let open = || -> std::io::Result<UnixListener> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        // Nobody gets in before it listens.
        if let Some(group) = group {
            chown(path, None, Some(group))?;
        }
        fs::set_permissions(path, Permissions::from_mode(mode))?;
        listen(&socket, BACKLOG)?;
        Ok(UnixListener::from(socket))
    };
    open().with_context(|| format!("cannot listen on {}; check permissions", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn sockets_are_for_whom_they_are_meant() {
        let temp = tempfile::tempdir().unwrap();
        let dir = GridDir::choose(Some(temp.path())).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let own = rustix::process::getgid().as_raw().to_string();
        let opened = open(&dir, Some(&own)).unwrap();
        assert_eq!((mode(&dir.control_socket()), mode(&dir.reader_socket())), (0o600, 0o660));
        assert_eq!(mode(&dir.api_socket()), 0o660);
        assert_eq!(opened.control.iter().map(|(_, role)| *role).collect::<Vec<_>>(), [Role::Admin, Role::Reader]);
        drop(opened);
        drop(open(&dir, None).unwrap());
        assert_eq!(mode(&dir.api_socket()), 0o600);
        let gone = UnixStream::connect(dir.reader_socket()).unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::NotFound, "without the setting there is none");
        let error = open(&dir, Some("nobody-has-this")).unwrap_err().to_string();
        assert!(error.contains("groupadd nobody-has-this"), "{error}");
    }

    #[test]
    fn groups_are_found_by_name_or_number() {
        let groups = "root:x:0:\nops:x:1003:ann,bob\nbroken\n7:x:9:\n";
        assert_eq!(number_of("ops", groups), Some(1003));
        assert_eq!(number_of("1005", groups), Some(1005));
        assert_eq!(number_of("7", groups), Some(9), "a name that is there comes first");
        assert_eq!(number_of("op", groups), None);
    }
}
