//! The metadata store as this host uses it: from control-plane threads directly, from the reactor through a service,
//! since a swap waits for the disk.

use crate::daemon::outwait;
use crate::logger;
use anyhow::Result;
use holdfast_base::MetaReply;
use holdfast_runtime::mailbox::{self, Receiver};
use holdfast_runtime::meta::{LocalStore, MetaService, MetaStore, MetaTicket, OpenError};
use holdfast_runtime::{Waker, clock};
use std::path::Path;
use std::sync::Arc;

/// Requests of controllers, and their answers, that may wait.
pub const CALLS_MAX: usize = 1 << 16;

pub type Meta = Arc<dyn MetaStore>;

/// The embedded store: one file, which no other process may have open.
pub fn open(path: &Path) -> Result<Meta> {
    let open = || LocalStore::open(path, Arc::new(clock::now));
    Ok(Arc::new(outwait(open, |e| matches!(e, OpenError::InUse { .. }))?))
}

/// The reactor's way to the store.
pub struct MetaClient {
    pub service: MetaService,
    pub answers: Receiver<(MetaTicket, MetaReply)>,
}

impl MetaClient {
    pub fn start(meta: Meta, waker: Waker) -> Result<MetaClient> {
        let (sender, answers) = mailbox::mailbox(waker, CALLS_MAX);
        // One thread: a record's requests are served in the order in which they were asked.
        let service = MetaService::start(meta, 1, CALLS_MAX, move |ticket, reply| {
            if sender.post((ticket, reply)).is_err() {
                logger::error(format_args!("{CALLS_MAX} answers of the metadata store wait: the host stands still"));
            }
        })?;
        Ok(MetaClient { service, answers })
    }
}
