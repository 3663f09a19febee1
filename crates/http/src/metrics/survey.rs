//! What the page has beside what can be asked for: what is in the memory of a host, and in files of its machine.

use holdfast_api::{Error, Finding, HostStatus, Neighbour, SlowInfo, TaskInfo};

/// A certificate that this machine goes by.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Certificate {
    /// `authority`, `host NAME` or `node NUMBER`.
    pub role: String,
    /// Seconds since 1970.
    pub ends_s: u64,
}

/// Tells of a host and its machine. Each may block, and fails where it can't be told; nothing asks the metadata store,
/// other hosts or nodes.
pub trait Survey: Send + Sync {
    /// How busy volumes of the host are.
    ///
    /// # Errors
    /// The host does not answer.
    fn loads(&self) -> Result<Vec<Neighbour>, Error>;

    /// Where the time of these volumes' requests goes, for those that are in service here.
    ///
    /// # Errors
    /// The host does not answer.
    fn slow(&self, names: &[String]) -> Result<Vec<(String, SlowInfo)>, Error>;

    /// What the host does in the background.
    ///
    /// # Errors
    /// Records can't be read.
    fn tasks(&self, status: &HostStatus) -> Result<Vec<TaskInfo>, Error>;

    /// What is not well, as `holdfast status` says it; without a status that the host does not say how it is.
    ///
    /// # Errors
    /// Files of the machine can't be read.
    fn findings(&self, status: Option<&HostStatus>) -> Result<Vec<Finding>, Error>;

    /// None in a grid without TLS.
    ///
    /// # Errors
    /// They can't be read.
    fn certificates(&self) -> Result<Vec<Certificate>, Error>;

    /// Members of the metadata store that the host is told of; none where that is a file.
    ///
    /// # Errors
    /// It is not known.
    fn members(&self) -> Result<usize, Error>;
}
